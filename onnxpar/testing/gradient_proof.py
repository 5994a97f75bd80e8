"""Tests gradient rules, one node at a time.

Compares gradients in float64 with central differences, and gradients in float32 under onnxruntime
with the float64 gradients. In float64, a graph runs in onnxruntime if onnxruntime has the kernels,
else in ONNX's reference implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxpar.base.custom_ops import quiet_options
from onnxpar.testing.case import Case
from onnxpar.testing.gradient_reference import REFERENCE_OPS
from onnxpar.training.gradients.reverse import gradients
from onnxpar.training.gradients.value import Builder

Array = npt.NDArray[Any]
STEP = 1e-5
"""The step of a central difference: half the distance between its two points."""
DOUBLE, SINGLE, LINEAR = 1e-7, 1e-4, 1e-5
"""The largest errors, relative to the gradient's largest value: of float64 gradients against
central differences, of float32 gradients against float64, and of float32 gradients against wide
differences."""
_ORT = ort.capi.onnxruntime_pybind11_state
_EXPANDED = ("Attention",)
"""Ops that onnxruntime expands in float64 by a function body that ONNX has corrected since; the
reference implementation runs them."""


class Erf(OpRun):
    """The error function in the dtype of its operand; ONNX's reference computes in float32."""

    def _run(self, x: Array) -> tuple[Array]:
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


class Gelu(OpRun):
    """The activation in the dtype of its operand; ONNX's reference computes in float32."""

    op_domain = ""

    def _run(self, x: Array, approximate: str | None = None) -> tuple[Array]:
        if approximate == "tanh":
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
            return ((0.5 * x * (1 + np.tanh(inner))).astype(x.dtype),)
        phi = np.vectorize(math.erf, otypes=[x.dtype])(x * math.sqrt(0.5))
        return ((0.5 * x * (1 + phi)).astype(x.dtype),)


class Program:
    """A graph that is ready to run in onnxruntime. With `reference`, it runs in ONNX's reference
    implementation if onnxruntime lacks kernels for float64."""

    def __init__(self, graph: gs.Graph, reference: bool) -> None:
        self.outputs = [t.name for t in graph.outputs]
        model = gs.export_onnx(graph, do_type_check=False)
        options = quiet_options(1, optimized=False)
        self.session: Any
        try:
            if reference and any(node.op in _EXPANDED for node in graph.nodes):
                raise _ORT.NotImplemented
            self.session = ort.InferenceSession(
                model.SerializeToString(), options, ["CPUExecutionProvider"]
            )
        except (_ORT.NotImplemented, _ORT.InvalidGraph):
            if not reference:
                raise
            self.session = ReferenceEvaluator(model, new_ops=[Erf, Gelu, *REFERENCE_OPS])

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs the graph with these inputs, by name. Returns its results by name."""
        results = self.session.run(None, dict(feeds))
        return dict(zip(self.outputs, results, strict=True))


class Gradient:
    """A case with operands of one floating-point dtype, and the graph that computes its gradients.

    dtype    np.float32 or np.float64
    wrt      the indices of the operands to differentiate by; None: all floating-point operands.
             Other operands that are arrays stay constants, unless they are fed
    results  the number of the node's results, from the first, that have incoming gradients
    """

    def __init__(self, case: Case, dtype: Any, wrt: Sequence[int] | None, results: int) -> None:
        self.case = case
        self.values = {k: _as(v, dtype) for k, v in case.values.items()}
        constants = [
            f"x{i}"
            for i, operand in enumerate(case.operands)
            if isinstance(operand, np.ndarray) and i not in case.fed
            if not _is_float(operand) or (wrt is not None and i not in wrt)
        ]
        self.feeds = {k: v for k, v in self.values.items() if k not in constants}
        floats = [i for i in range(len(case.operands)) if _is_float(self.feeds.get(f"x{i}"))]
        self.wrt = floats if wrt is None else list(wrt)
        is_double = dtype is np.float64
        self.forward = Program(self._graph({}), reference=is_double)
        self.whole = self.forward.run(self.feeds)
        self.flows = [f"y{i}" for i in range(results) if _is_float(self.whole[f"y{i}"])]
        self.program = Program(self._differentiated(), reference=is_double)

    def seeds(self) -> dict[str, Array]:
        """Returns the incoming gradients of the results, by name (`dy0`): random numbers, which are
        the same in every dtype."""
        rng = np.random.default_rng(100)  # another generator than the operands'
        return {
            f"d{y}": _as(rng.standard_normal(self.whole[y].shape), self.whole[y].dtype)
            for y in self.flows
        }

    def run(self) -> dict[str, Array]:
        """Returns the gradients that the gradient rule computes, by name (`d0` for operand 0);
        zeros for an operand without a gradient."""
        given = {k: v for k, v in {**self.feeds, **self.seeds()}.items() if k in self.read}
        found = self.program.run(given) if self.program.outputs else {}
        return {f"d{i}": found.get(f"d{i}", np.zeros_like(self.feeds[f"x{i}"])) for i in self.wrt}

    def differences(self, step: float = STEP) -> dict[str, Array]:
        """Returns the gradients by central differences with this step, by name (`d0` for operand
        0)."""
        return {f"d{i}": self._difference(f"x{i}", step) for i in self.wrt}

    def _difference(self, name: str, step: float) -> Array:
        """Returns the gradient by the operand `name`: each of its elements is moved by the step,
        both ways."""
        seeds = self.seeds()
        value = self.feeds[name]
        found = np.zeros_like(value)
        for at in np.ndindex(value.shape):
            ends = []
            for side in (step, -step):
                moved = value.copy()
                moved[at] += side
                results = self.forward.run({**self.feeds, name: moved})
                ends.append(sum(float((results[y] * seeds[f"d{y}"]).sum()) for y in self.flows))
            found[at] = (ends[0] - ends[1]) / (2 * step)
        return found

    def _graph(self, whole: Mapping[str, Array]) -> gs.Graph:
        """Returns the graph with the node; the node's results get the dtypes and shapes of `whole`,
        the results of an earlier run."""
        graph = self.case.graph()
        node = graph.nodes[0]
        for i, tensor in enumerate(node.inputs):
            if tensor.name in self.feeds:
                value = self.feeds[tensor.name]
                node.inputs[i] = gs.Variable(tensor.name, value.dtype, list(value.shape))
            elif tensor.name:
                node.inputs[i] = gs.Constant(tensor.name, self.values[tensor.name])
        graph.inputs = [t for t in node.inputs if t.name in self.feeds]
        for tensor in node.outputs:
            if tensor.name in whole:
                tensor.dtype, tensor.shape = whole[tensor.name].dtype, whole[tensor.name].shape
        return graph

    def _differentiated(self) -> gs.Graph:
        """Returns the graph with the node and the gradient nodes that its rule appends."""
        graph = self._graph(self.whole)
        graph.outputs = []
        builder = Builder(graph, "seed")
        seeds = {}
        for name in self.flows:
            seed = gs.Variable(f"d{name}", self.whole[name].dtype, list(self.whole[name].shape))
            graph.inputs.append(seed)
            seeds[name] = builder.value(seed)
        wanted = {f"x{i}": i for i in self.wrt}
        operands = [t for t in graph.inputs if t.name in wanted]
        found = gradients(graph, seeds, operands)
        for name, gradient in found.items():
            if gradient is not None:
                result = gs.Variable(f"d{wanted[name]}", gradient.dtype, gradient.shape)
                node = gs.Node("Identity", f"out{name}", {}, [gradient.tensor], [result])
                graph.nodes.append(node)
                graph.outputs.append(result)
        self.read = {t.name for node in graph.nodes for t in node.inputs}
        graph.inputs = [t for t in graph.inputs if t.name in self.read]
        return graph


def prove_gradient(case: Case, wrt: Sequence[int] | None = None, results: int = 1) -> list[str]:
    """Returns a message for each wrong gradient of a node; empty if all are right. `wrt` and
    `results` are as in `Gradient`."""
    double = Gradient(case, np.float64, wrt, results)
    single = Gradient(case, np.float32, wrt, results)
    found = double.run()
    wrong = _compare(found, double.differences(), DOUBLE, "central differences")
    wrong += _compare(single.run(), found, SINGLE, "the same in float64")
    return [f"{case.op}: {w}" for w in wrong]


def prove_linear_gradient(
    case: Case, wrt: Sequence[int] | None = None, results: int = 1
) -> list[str]:
    """Like `prove_gradient`, for a node that is linear in its operands and has no float64 kernel in
    onnxruntime: because of the linearity, wide differences are exact up to rounding."""
    single = Gradient(case, np.float32, wrt, results)
    wrong = _compare(single.run(), single.differences(1.0), LINEAR, "wide differences")
    return [f"{case.op}: {w}" for w in wrong]


def _compare(
    have: Mapping[str, Array], want: Mapping[str, Array], tolerance: float, what: str
) -> list[str]:
    """Returns a message for each gradient in `have` that differs from `want` by more than
    `tolerance`, relative to its largest value. `what` names `want` in messages."""
    wrong = []
    for name, expected in want.items():
        found = have[name]
        largest = float(np.abs(expected).max(initial=1e-3))
        if found.shape != expected.shape:
            wrong.append(f"{name} has shape {found.shape}, not {expected.shape}")
        elif not np.allclose(found, expected, rtol=0, atol=tolerance * largest):
            error = float(np.abs(found - expected).max() / largest)
            wrong.append(f"{name} is off by {error:.1e} of its largest from {what}")
    return wrong


def _is_float(value: Array | None) -> bool:
    return value is not None and np.issubdtype(value.dtype, np.floating)


def _as(value: Array, dtype: Any) -> Array:
    return value.astype(dtype) if _is_float(value) else value
