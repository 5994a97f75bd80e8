"""One node with concrete operands, and how to run it in onnxruntime: what the oracle works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort

Array = npt.NDArray[Any]
Operand = tuple[int, ...] | Array | None


@dataclass(frozen=True, eq=False)
class Case:
    """One node with concrete operands.

    An operand is a shape (random floats are fed), an array (a constant of the model, or fed where
    its position is in `fed`), or None where it is left out.
    """

    op: str
    operands: Sequence[Operand]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    fed: Sequence[int] = ()
    outputs: int = 1
    opset: int = 20
    domain: str = ""

    @cached_property
    def values(self) -> dict[str, Array]:
        """The operands' values by name."""
        rng = np.random.default_rng(len(self.operands))
        values = {}
        for i, operand in enumerate(self.operands):
            if isinstance(operand, tuple):
                values[f"x{i}"] = rng.standard_normal(operand).astype(np.float32)
            elif operand is not None:
                values[f"x{i}"] = operand
        return values

    def graph(self, results: Sequence[Array] = ()) -> gs.Graph:
        """The one-node graph; its results have the shapes of those given."""
        feeds = [self._operand(i) for i in range(len(self.operands))]
        made = [gs.Variable(f"y{i}") for i in range(self.outputs)]
        for tensor, value in zip(made, results, strict=False):
            tensor.dtype, tensor.shape = value.dtype, value.shape
        attrs = dict(self.attrs)
        if self.opset < 13:
            attrs["onnxpar.opset"] = self.opset
        node = gs.Node(self.op, "node", attrs, feeds, made, domain=self.domain or None)
        inputs = [t for t in feeds if isinstance(t, gs.Variable) and t.name]
        domains = [onnx.helper.make_opsetid("", self.opset)]
        domains += [onnx.helper.make_opsetid(self.domain, 1)] if self.domain else []
        return gs.Graph(
            [node], inputs, made, opset=self.opset, import_domains=domains, ir_version=10
        )

    def _operand(self, index: int) -> gs.Tensor:
        name = f"x{index}"
        if name not in self.values:
            return gs.Variable.empty()
        value = self.values[name]
        if isinstance(self.operands[index], tuple) or index in self.fed:
            return gs.Variable(name, value.dtype, value.shape)
        return gs.Constant(name, value)


@dataclass(frozen=True)
class Cut:
    """A dimension of a tensor that another op would cut into atoms: `(2 n)` or `k + n`."""

    factor: str
    tensor: str
    dim: int
    sizes: tuple[int, int]
    kind: str

    def apply(self, graph: gs.Graph) -> None:
        """Adds the op that cuts it."""
        tensor = graph.tensors()[self.tensor]
        shape = list(tensor.shape)
        if self.kind == "product":
            shape[self.dim : self.dim + 1] = self.sizes
            shapes = [shape]
        else:
            shapes = [[*shape[: self.dim], s, *shape[self.dim + 1 :]] for s in self.sizes]
        results = [gs.Variable(f"cut{i}", tensor.dtype, s) for i, s in enumerate(shapes)]
        op, attrs = ("Split", {"axis": self.dim}) if len(results) > 1 else ("Reshape", {})
        graph.nodes.append(gs.Node(op, "cut", attrs, [tensor], results))


_SESSIONS: dict[bytes, ort.InferenceSession] = {}


def run(graph: gs.Graph, feeds: Mapping[str, Array]) -> list[Array]:
    """Runs a graph; constants that are not fed have their own values.

    Constants become inputs and sizes are open (but for shape-like constants), so that ranks whose
    nodes are the same share a session.
    """
    values = dict(feeds)
    inputs = []
    bare = [gs.Node(n.op, n.name, dict(n.attrs), domain=n.domain) for n in graph.nodes]
    fed: dict[str, gs.Variable] = {}
    for old, node in zip(graph.nodes, bare, strict=True):
        node.attrs.pop("onnxpar.opset", None)
        for tensor in old.inputs:
            if isinstance(tensor, gs.Constant):
                values.setdefault(tensor.name, tensor.values)
            if tensor.name in values and tensor.name not in fed:
                value = values[tensor.name]
                fixed = isinstance(tensor, gs.Constant) and np.issubdtype(value.dtype, np.integer)
                shape = value.shape if fixed else [f"{tensor.name}_{i}" for i in range(value.ndim)]
                fed[tensor.name] = gs.Variable(tensor.name, value.dtype, shape)
                inputs.append(fed[tensor.name])
            node.inputs.append(fed.get(tensor.name) or _named(fed, tensor.name))
        node.outputs.extend([_named(fed, t.name) for t in old.outputs])
    outputs = [fed[t.name] for t in graph.outputs]
    copy = gs.Graph(
        bare, inputs, outputs, opset=graph.opset, import_domains=graph.import_domains, ir_version=10
    )
    model = gs.export_onnx(copy, do_type_check=False).SerializeToString()
    if model not in _SESSIONS:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        _SESSIONS[model] = ort.InferenceSession(model, options, ["CPUExecutionProvider"])
    used = {t.name for t in inputs}
    return list(_SESSIONS[model].run(None, {k: np.asarray(values[k]) for k in sorted(used)}))


def _named(made: dict[str, gs.Variable], name: str) -> gs.Variable:
    return made.setdefault(name, gs.Variable(name)) if name else gs.Variable.empty()
