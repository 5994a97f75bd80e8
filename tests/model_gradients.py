"""Gradients of the committed models in onnxruntime, and how far they may be from others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import onnxpar.training.gradients  # noqa: F401  (registers the gradient rules)
from onnxpar.graph.write_model import export_model
from onnxpar.load.load import load
from onnxpar.load.loading import LoadRequest
from onnxpar.training.backward import add_backward
from onnxpar.training.rewrite import add_output
from onnxpar.training.step_state import StepRequest

Array = np.ndarray[Any, Any]
TOLERANCE = 1e-4
"""Of the largest element of a gradient, or of a thousandth of the model's largest."""


def run_gradients(
    path: Path, loss: str, output: str | None, feeds: Mapping[str, Array]
) -> tuple[float, dict[str, Array]]:
    """The loss of a model's output and the gradients of all that is trained, by name; `feeds` has a
    `target` beside the model's inputs."""
    model = load(path, LoadRequest(for_training=True))
    back = add_backward(model, StepRequest(loss, output))
    model.graph.outputs = []
    for name, gradient in {"": back.loss, **back.gradients}.items():
        add_output(model.graph, gradient, f"{name}.grad")
    model.graph.cleanup(remove_unused_graph_inputs=False).toposort()
    proto = export_model(model.graph, model.header)
    onnx.checker.check_model(proto)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    given = dict(feeds)
    given["labels" if loss == "softmax-cross-entropy" else "target"] = given.pop("target")
    names = [o.name for o in session.get_outputs()]
    results = dict(zip(names, session.run(names, given), strict=True))
    value = float(results.pop(".grad"))
    return value, {name.removesuffix(".grad"): found for name, found in results.items()}


def bounds(largest: Mapping[str, float]) -> dict[str, float]:
    """How far each gradient may be off, given the largest element of each."""
    least = 1e-3 * max(largest.values())
    return {name: TOLERANCE * max(value, least) for name, value in largest.items()}
