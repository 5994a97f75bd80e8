"""Whole graphs, given as text, whose gradients are held against central differences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import onnxruntime as ort

from onnxpar.graph.interchange import export_graph
from onnxpar.load.load import Model, load
from onnxpar.training.gradients.reverse import gradients
from onnxpar.training.gradients.value import Builder

Array = np.ndarray[Any, Any]
STEP, ERROR = 1e-5, 1e-7


def parse(text: str, opset: int = 20) -> onnx.ModelProto:
    """A model of a graph given as text."""
    header = f'<ir_version: 8, opset_import: ["" : {opset}]>\n'
    return onnx.parser.parse_model(header + text)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def is_float(value: Array) -> bool:
    return bool(np.issubdtype(value.dtype, np.floating))


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([len(shape), seed]).standard_normal(shape)


def differentiated(model: Model) -> onnx.ModelProto:
    """The model with inputs `seed.Y` for its results of floats, and with outputs `grad.X`, where
    there is a gradient, and all that it had."""
    graph = model.graph
    seeds: dict[str, Any] = {}
    builder = Builder(graph, "seed")
    for output in graph.outputs:
        if np.issubdtype(output.dtype, np.floating):
            seed = gs.Variable(f"seed.{output.name}", output.dtype, output.shape)
            graph.inputs.append(seed)
            seeds[output.name] = builder.value(seed)
    wanted = [t for t in graph.inputs if not t.name.startswith("seed.")]
    wanted = [t for t in wanted if np.issubdtype(t.dtype, np.floating)]
    for name, gradient in gradients(graph, seeds, wanted).items():
        if gradient is not None:
            result = gs.Variable(f"grad.{name}", gradient.dtype, gradient.tensor.shape)
            node = gs.Node("Identity", result.name, {}, [gradient.tensor], [result])
            graph.nodes.append(node)
            graph.outputs.append(result)
    return export_graph(graph, model.header)


class Program:
    """A model and its gradients, in onnxruntime."""

    def __init__(self, folder: Path, text: str | onnx.ModelProto, opset: int = 20) -> None:
        model = parse(text, opset) if isinstance(text, str) else text
        onnx.checker.check_model(model)
        path = folder / "model.onnx"
        onnx.save(model, path)
        self.forward = session(model)
        self.model = differentiated(load(path))
        onnx.checker.check_model(self.model)
        self.session = session(self.model)
        self.outputs = [o.name for o in model.graph.output]

    def run(self, **feeds: Array) -> dict[str, Array]:
        """The gradients, zeros where there is none."""
        names = [o.name for o in self.session.get_outputs()]
        read = {i.name for i in self.session.get_inputs()}
        given = {k: v for k, v in {**feeds, **self.seeds(feeds)}.items() if k in read}
        found = dict(zip(names, self.session.run(None, given), strict=True))
        for name in self.outputs:
            np.testing.assert_array_equal(found[name], self.results(feeds)[name])
        none = {k: np.zeros_like(v) for k, v in feeds.items() if is_float(v)}
        return {k: found.get(f"grad.{k}", zeros) for k, zeros in none.items()}

    def results(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self.outputs, self.forward.run(None, dict(feeds)), strict=True))

    def seeds(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        whole = {k: v for k, v in self.results(feeds).items() if is_float(v)}
        return {f"seed.{k}": random(*v.shape).astype(v.dtype) for k, v in whole.items()}

    def differences(self, **feeds: Array) -> dict[str, Array]:
        seeds = self.seeds(feeds)

        def total(name: str, moved: Array) -> float:
            found = self.results({**feeds, name: moved})
            return sum(float((found[k.removeprefix("seed.")] * s).sum()) for k, s in seeds.items())

        return {
            k: difference(lambda x, k=k: total(k, x), v) for k, v in feeds.items() if is_float(v)
        }

    def check(self, **feeds: Array) -> dict[str, Array]:
        """Holds the gradients against differences, and returns them."""
        found, wanted = self.run(**feeds), self.differences(**feeds)
        for name, value in wanted.items():
            atol = ERROR * max(1.0, float(np.abs(value).max(initial=0)))
            np.testing.assert_allclose(found[name], value, rtol=0, atol=atol, err_msg=name)
        return found


def difference(function: Any, x: Array) -> Array:
    """The gradient of a function of one array, by central differences."""
    found = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        ends = []
        for step in (STEP, -STEP):
            moved = x.copy()
            moved[at] += step
            ends.append(function(moved))
        found[at] = (ends[0] - ends[1]) / (2 * STEP)
    return found
