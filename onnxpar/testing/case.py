"""Test cases, each a node with concrete operands, and programs that run a case in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort

from onnxpar.base.arrays import Array
from onnxpar.base.custom_ops import quiet_options
from onnxpar.graph.paged_attention import COMPUTE
from onnxpar.runtime.ranks.library import library_path

Operand = tuple[int, ...] | Array | None


@dataclass(frozen=True, eq=False)
class Case:
    """One node with concrete operands.

    An operand is a shape (then random floats are fed), an array (a constant of the model, but fed
    if its index is in `fed`), or None if it is missing.
    """

    op: str
    operands: Sequence[Operand]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    fed: Sequence[int] = ()
    outputs: int = 1
    opset: int = 20
    domain: str = ""
    version: int = 1

    @cached_property
    def values(self) -> dict[str, Array]:
        """The values of the operands, by name: x0, x1 ..."""
        rng = np.random.default_rng(len(self.operands))
        values = {}
        for i, operand in enumerate(self.operands):
            if isinstance(operand, tuple):
                values[f"x{i}"] = rng.standard_normal(operand).astype(np.float32)
            elif operand is not None:
                values[f"x{i}"] = operand
        return values

    def graph(self, results: Sequence[Array] = ()) -> gs.Graph:
        """Returns the graph with the node; the node's results get the dtypes and shapes of
        `results`."""
        feeds = [self._operand(i) for i in range(len(self.operands))]
        made = [gs.Variable(f"y{i}") for i in range(self.outputs)]
        for tensor, value in zip(made, results, strict=False):
            tensor.dtype, tensor.shape = value.dtype, _known_shape(value)
        node = gs.Node(self.op, "node", dict(self.attrs), feeds, made, domain=self.domain or None)
        inputs = [t for t in feeds if isinstance(t, gs.Variable) and t.name]
        domains = [onnx.helper.make_opsetid("", self.opset)]
        domains += [onnx.helper.make_opsetid(self.domain, self.version)] if self.domain else []
        return gs.Graph(
            [node], inputs, made, opset=self.opset, import_domains=domains, ir_version=10
        )

    def _operand(self, index: int) -> gs.Tensor:
        name = f"x{index}"
        if name not in self.values:
            return gs.Variable.empty()
        value = self.values[name]
        if isinstance(self.operands[index], tuple) or index in self.fed:
            return gs.Variable(name, value.dtype, _known_shape(value))
        return gs.Constant(name, value)


def _known_shape(value: Array) -> tuple[int, ...] | None:
    """The shape of an array; None of strings and maps, which have none in a graph."""
    return None if value.dtype == object else value.shape


@dataclass(frozen=True)
class Cut:
    """A dimension of a tensor that another op divides into atoms: into a product `(2 n)` or into
    segments `k + n`, as `kind` says."""

    factor: str
    tensor: str
    dim: int
    sizes: tuple[int, int]
    kind: str

    def apply(self, graph: gs.Graph) -> None:
        """Adds the op that divides the dimension to a graph."""
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


@dataclass(frozen=True, eq=False)
class Program:
    """A graph that is ready to run. Its constants are operands, too, with `values` as defaults."""

    session: ort.InferenceSession
    operands: frozenset[str]
    values: Mapping[str, Array]

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Runs the graph, and returns its results; `feeds` are operands by name."""
        given = {**self.values, **feeds}
        found = self.session.run(None, {k: np.asarray(given[k]) for k in self.operands})
        return [np.array(v, object) if isinstance(v, list) else v for v in found]


def compiled(graph: gs.Graph) -> Program:
    """Returns a program that runs a graph in onnxruntime, with operands of any sizes.

    Equal graphs share a session, unless they draw random numbers: the random generator of a session
    continues from run to run.
    """
    tensors = {t.name: t for node in graph.nodes for t in node.inputs if t.name}
    values = {name: t.values for name, t in tensors.items() if isinstance(t, gs.Constant)}
    bare = {name: gs.Variable(name) for name in tensors}
    operands = []
    for name, tensor in tensors.items():
        if name in values or not tensor.inputs:
            bare[name].dtype = tensor.dtype
            bare[name].shape = _open_shape(tensor)
            operands.append(bare[name])
    nodes = []
    for node in graph.nodes:
        inputs = [bare[t.name] if t.name else gs.Variable.empty() for t in node.inputs]
        for tensor in node.outputs:
            bare.setdefault(tensor.name, gs.Variable(tensor.name))
        outputs = [bare[t.name] for t in node.outputs]
        nodes.append(gs.Node(node.op, node.name, dict(node.attrs), inputs, outputs, node.domain))
    copy = gs.Graph(
        nodes,
        operands,
        [bare[t.name] for t in graph.outputs],
        opset=graph.opset,
        import_domains=graph.import_domains,
        ir_version=10,
    )
    model = gs.export_onnx(copy, do_type_check=False).SerializeToString()
    if model not in _SESSIONS or any("seed" in node.attrs for node in graph.nodes):
        options = quiet_options(1, optimized=False)
        if any(node.domain == COMPUTE for node in graph.nodes):
            options.register_custom_ops_library(str(library_path()))
        _SESSIONS[model] = ort.InferenceSession(model, options, ["CPUExecutionProvider"])
    return Program(_SESSIONS[model], frozenset(t.name for t in operands), values)


def has_fixed_sizes(node: gs.Node) -> bool:
    """True for a node that onnxruntime loads only with the sizes of its operands: its function body
    contains them, or its shape inference compares them."""
    if node.op == "GatherBlockQuantized":
        return len(node.inputs) > 3
    return node.op == "CausalConvWithState" and not node.domain


def _open_shape(tensor: gs.Tensor) -> list[int | str] | None:
    """Returns a shape with open sizes, or the tensor's own if shape inference needs it: for tables,
    for operands of a Resize other than the first, and for nodes of fixed sizes."""
    if any(map(has_fixed_sizes, tensor.outputs)):
        return list(tensor.shape)
    if isinstance(tensor, gs.Constant) and any(
        n.op.endswith("EmbedLayerNormalization") for n in tensor.outputs
    ):
        return list(tensor.shape)
    if any(n.op == "Resize" and n.inputs[0] is not tensor for n in tensor.outputs):
        return list(tensor.shape)
    if tensor.shape is None:
        return None
    return [f"{tensor.name}_{i}" for i in range(len(tensor.shape))]


def run(graph: gs.Graph, feeds: Mapping[str, Array]) -> list[Array]:
    """Runs the graph, and returns its results; `feeds` are operands by name."""
    return compiled(graph).run(feeds)
