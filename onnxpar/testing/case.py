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
"""A shape (random floats are fed), an array (a constant of the model), or None (a missing
operand)."""


@dataclass(frozen=True, eq=False)
class Case:
    """One node with concrete operands.

    operands  the operands, in order: a shape (then random floats are fed), an array (a constant of
              the model, but fed if its index is in `fed`), or None if the operand is missing
    outputs   the number of results
    version   the version of the operator set `domain`, if it is not ONNX's own (`opset`)
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
        `results`, the arrays that an earlier run has given."""
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
        """Returns the operand `index`: a variable that is fed, a constant, or an empty variable if
        missing."""
        name = f"x{index}"
        if name not in self.values:
            return gs.Variable.empty()
        value = self.values[name]
        if isinstance(self.operands[index], tuple) or index in self.fed:
            return gs.Variable(name, value.dtype, _known_shape(value))
        return gs.Constant(name, value)


def _known_shape(value: Array) -> tuple[int, ...] | None:
    """Returns the shape of an array; None for strings and maps, which have no shape in a graph."""
    return None if value.dtype == object else value.shape


@dataclass(frozen=True)
class Cut:
    """A dimension of a tensor that another op divides, so that a rule is tested on a part of a
    dimension: a Reshape divides it into a product `(2 n)`, or a Split into segments `k + n`.

    factor  the factor of the rule that is the dimension
    tensor  the name of the tensor
    dim     the index of the dimension
    sizes   the sizes of its two factors or segments
    kind    "product" or "concat"
    """

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
    """A compiled graph. Its constants are operands, too, so that a run may replace them.

    operands  the names of all operands
    values    the default values of operands that are constants
    """

    session: ort.InferenceSession
    operands: frozenset[str]
    values: Mapping[str, Array]

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Runs the graph with these operands, by name. Returns its results, in order."""
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
    """Returns a shape with open sizes (known only at run time). A tensor whose sizes shape
    inference needs keeps its own: tables, operands of a Resize other than the first, and operands
    of nodes with fixed sizes."""
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
    """Runs a graph in onnxruntime with these operands, by name. Returns its results, in order."""
    return compiled(graph).run(feeds)
