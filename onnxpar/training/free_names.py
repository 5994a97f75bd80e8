"""Renames tensors of a model whose names its training step needs."""

from __future__ import annotations

from onnxpar.base.errors import ModelError
from onnxpar.graph.subgraphs import all_nodes, constants, scopes
from onnxpar.graph.training_spec import AVERAGE, EVALUATION, MAGNITUDES, SCALE, SEED
from onnxpar.training.loss_scale import GOOD
from onnxpar.training.step_state import StepState

LOSS = "loss"
PORTS = (LOSS, "learning_rate", "step", SEED, "gradient_norm", "skipped", SCALE, GOOD, MAGNITUDES)
ENDINGS = (
    ".next",
    ".grad",
    ".again",
    f".{AVERAGE}",
    f"{EVALUATION}.loss",
    f"{EVALUATION}.accuracy",
)
"""Suffixes of the names of tensors that a training step adds to a model."""


def free_names(to: StepState) -> None:
    """Renames tensors whose names the step needs for its own inputs and outputs. Errors: ModelError
    if the name of the loss is taken by an input or a weight."""
    graph = to.graph
    for tensor in (*graph.inputs, *constants(graph)):
        if tensor.name == LOSS:
            raise ModelError(
                f"the model has a tensor {LOSS!r}, a name that the step needs; rename the tensor"
            )
    nodes = list(all_nodes(graph))
    results = {t.name for node in nodes for t in node.outputs}
    taken = {n for n in results if n in PORTS or n.endswith(ENDINGS)}
    bounds = [t for scope in scopes(graph) for t in (*scope.inputs, *scope.outputs)]
    tensors = [*bounds, *(t for node in nodes for t in (*node.inputs, *node.outputs))]
    for tensor in {id(t): t for t in tensors}.values():
        if tensor.name in taken:
            tensor.name = f"model/{tensor.name}"
    to.renamed = {f"model/{name}": name for name in taken}
