"""The description of a training step in its model's metadata: which inputs and outputs have which
role."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from onnxpar.base.errors import ModelError

if TYPE_CHECKING:  # ranks read these names, and need no onnx
    import onnx

METADATA = "onnxpar.training"
"""The key of this description in the model's metadata."""

EVALUATION = "evaluation"
"""Prefix of the names of evaluation outputs; also the name of the program that computes only
these."""
RESIDUAL = "residual"
"""Kind of slots (states) that hold the part of a gradient that a rank has not sent yet, under
compression."""
FROZEN = "frozen"
"""Kind of slots (states) that hold a weight that this step does not train, but another step may."""
IN_MODEL = ("parameter", "statistic", FROZEN)
"""Kinds of slots (states) that hold weights of the model under their own names."""
AVERAGE = "ema"
"""Kind of slots (states) that hold moving averages of parameters."""
GRADIENT = ".grad"
"""Suffix of the names of outputs that are gradients."""
SCALE = "loss_scale"
"""Name of the input for a dynamic loss scale, and kind of its slot (state)."""
LEAST_SCALE = 1.0
"""The dynamic loss scale does not fall below this: if gradients are not finite even then, the scale
is not the cause."""
SKIPPED = "skipped"
"""Name of the metric that is 1 if a gradient was not finite, so that nothing was updated."""
IGNORED = -100
"""A label that the loss and the accuracy skip, as in PyTorch."""
SAMPLES = "samples"
"""Name of the input that says how many samples of a batch count, for losses that cannot tell by
their labels; by default, all do."""
WEIGHT = f"{EVALUATION}.weight"
"""Prefix of the names of outputs by which means of an evaluation are weighted: the divisor of the
mean, as a fraction of the elements of a batch."""
MAGNITUDES = "magnitudes"
"""Name of an output with the sum of absolute values of each parameter after the update (of a lazily
trained table, of the rows that the step reads). If an element is not finite, its sum is not."""
SEED = "seed"
"""Name of the input from which all random numbers of a step are derived."""


@dataclass(frozen=True)
class Slot:
    """A state of a training step: the tensor `output` of a step is the `input` of the next one.

    kind        "parameter", FROZEN, or the optimizer's name for the tensor ("momentum")
    of          the parameter to which the tensor belongs; empty if it belongs to all
    default     True if the model has the first value; else the tensor starts as zero
    torch       the parameter's names in torch, if they differ from the model's
    transposed  True if the model has the transpose of torch's parameter
    stored      the weights of the model's file that the parameter replaces, True for transposed
                ones; empty for just the weight of its own name
    """

    input: str
    output: str
    kind: str
    of: str = ""
    default: bool = False
    torch: Sequence[str] = ()
    transposed: bool = False
    stored: Mapping[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks that names, which may come from JSON, are text. Errors: TypeError."""
        for name in (self.input, self.output, self.kind, self.of, *self.torch, *self.stored):
            if not isinstance(name, str):
                raise TypeError(f"a state has the name {name!r:.60}")


@dataclass(frozen=True)
class StepSharding:
    """The sharding of a step's tensors over a mesh, if the step is a program per rank (written for
    the ranks by hand).

    mesh     names and sizes of the axes
    tensors  an entry for each tensor, as in strategies
    like     tensors that are sharded like another one, by its name
    groups   the lists of ranks of each named group
    """

    mesh: list[tuple[str, int]]
    tensors: dict[str, list[Any]]
    like: dict[str, str]
    groups: dict[str, list[list[int]]] = field(default_factory=dict)


@dataclass
class Step:
    """The roles of a training step's inputs and outputs, by name. Field names are part of the
    metadata.

    seed            input for random numbers; None if the step draws none
    labels          input for class numbers, where -100 does not count; None if the loss has none
    target          input with which the loss compares the output; None if there is none
    samples         input for the number of samples that count; None if labels say so, or all count
    full_batches    True if each sample of a batch affects the results of the others
    turns           number of micro-batches that the step processes one after the other
    precision       dtype of computation; None for the dtype of the parameters
    data            the inputs that a training run must feed
    batch           the dimension of the samples, for each input that has samples
    metrics         outputs to report for each step
    evaluation      outputs that measure the model without updating it, and can be computed alone
    slots           the states
    magnitudes      the parameters in the order of the output MAGNITUDES; empty if there is none
    gradients       tensors of the graph that are gradients of the loss, by parameter
    gradient_scale  constant factor of these gradients; a factor that changes is the slot SCALE
    rows            sums of the gradients of looked-up rows, by lazily trained table
    deal            sharding of the tensors, if the step is written as the program of one rank
    compression     how gradients that ranks exchange are compressed; empty: not at all
    cautions        sentences on differences between training this step and the exported network
    sampled         numbers of groups of classes, of classes that a step samples from each group,
                    and of all classes, by weight
    groups          names of parameters, by a description of their own hyperparameters
    """

    loss: str = "loss"
    rate: str = "learning_rate"
    seed: str | None = None
    labels: str | None = None
    target: str | None = None
    samples: str | None = None
    full_batches: bool = False
    turns: int = 1
    precision: str | None = None
    data: list[str] = field(default_factory=list)
    batch: dict[str, int] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=list)
    evaluation: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    magnitudes: list[str] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    gradient_scale: float = 1.0
    rows: dict[str, str] = field(default_factory=dict)
    deal: StepSharding | None = None
    compression: str = ""
    cautions: list[str] = field(default_factory=list)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)

    def text(self) -> str:
        """Returns the description as JSON text for the metadata."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(header: onnx.ModelProto) -> Step | None:
        """Returns the step that a model's metadata describes; None if the model is no training
        step. Errors: ModelError for a description that is damaged."""
        for entry in header.metadata_props:
            if entry.key == METADATA:
                try:
                    return Step.from_json(json.loads(entry.value))
                except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
                    raise ModelError(
                        f"the model's metadata {METADATA!r} is damaged: {type(error).__name__}: "
                        f"{error}; write the training step again with `onnxpar grad`"
                    ) from None
        return None

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Step:
        """Returns the step from the form that `dataclasses.asdict` gives."""
        slots = [Slot(**slot) for slot in data["slots"]]
        deal = StepSharding(**data["deal"]) if data.get("deal") else None
        return Step(**{**data, "slots": slots, "deal": deal})

    @property
    def unsplit(self) -> Step:
        """The step as the unsplit model has it: without states of kind RESIDUAL, which only ranks
        have."""
        return replace(self, slots=[s for s in self.slots if s.kind != RESIDUAL])

    @property
    def parameters(self) -> list[Slot]:
        """The states that are parameters."""
        return [s for s in self.slots if s.kind == "parameter"]
