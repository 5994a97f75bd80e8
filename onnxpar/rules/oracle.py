"""Proves rules: runs one node whole and on simulated ranks, and compares.

For every factor that a rule lets be split, over 2 and 3 ranks, in even and uneven parts, and for
every pair of factors at once: operands are cut by the layouts that the rule implies, the node is
rewritten by `localize_node`, each rank's node runs in onnxruntime, and each part of a result must
be that part of the whole result (or, where it is pending, reduce to it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort

from onnxpar.factors import GraphFactors, OpFactors, TensorFactors, analyse, with_axes
from onnxpar.layout import Layout, nested_parts
from onnxpar.mesh import Axes, Mesh
from onnxpar.rules.local import PerRank, localize_node
from onnxpar.rules.rule import Var

Array = npt.NDArray[Any]

TOLERANCE = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-12}
"""Largest error as a share of the largest value, by dtype; integers must be equal."""


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
class Split:
    """Axes and parts for some leaves of a node."""

    mesh: Mesh
    leaves: Mapping[int, tuple[Axes, tuple[int, ...] | None]]


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


class Oracle:
    """A case, what it computes whole, and its rule over atoms, as cut by another op if any."""

    def __init__(self, case: Case, cut: Cut | None = None) -> None:
        self.case = case
        self.cut = cut
        self.feeds = case.values
        self.whole = run(case.graph(), case.values)
        self.graph, self.factors = self._analysed()
        self.op = self.factors.ops[0]

    def _analysed(self) -> tuple[gs.Graph, GraphFactors]:
        graph = self.case.graph(self.whole)
        if self.cut is None:
            return graph, analyse(graph)
        self.cut.apply(graph)
        factors = analyse(graph)
        graph.nodes.pop().inputs.clear()
        return graph, factors

    def splits(self) -> Iterator[Split]:
        """Leaves alone over 2 and 3 ranks, and pairs of leaves over 2 x 2; if cut, those cut."""
        leaves = [
            (i, leaf)
            for i, leaf in enumerate(self.op.leaves)
            if self.cut is None or leaf.factor == self.cut.factor
        ]
        for i, leaf in leaves:
            for n in range(2, 3 + (self.cut is None)):
                mesh = Mesh.of([("x", n)])
                by_hand = (leaf.size - n + 1, *[1] * (n - 1))
                default = nested_parts(leaf.size, (n,))
                for parts in {default, by_hand, default[::-1]} if leaf.size >= n else ():
                    yield Split(mesh, {i: ((mesh.axis("x"),), None if parts == default else parts)})
        mesh = Mesh.parse("x=2,y=2")
        for (i, _), (j, _) in combinations(leaves, 2):
            kinds = {self.op.reduction(i), self.op.reduction(j)} - {None}
            if len(kinds) < 2:
                yield Split(mesh, {i: ((mesh.axis("x"),), None), j: ((mesh.axis("y"),), None)})

    def cuts(self) -> Iterator[Cut]:
        """Each factor that may be split, cut into a product and into segments."""
        for tensor, spec in [*zip(self.op.node.inputs, self.op.rule.inputs, strict=False)] + [
            *zip(self.op.node.outputs, self.op.rule.outputs, strict=False)
        ]:
            for dim, expr in enumerate(spec or ()):
                size = tensor.shape[dim]
                if isinstance(expr, Var) and expr.name not in self.op.whole and size >= 4:
                    segments = (size // 2, size - size // 2)
                    yield Cut(expr.name, tensor.name, dim, segments, "concat")
                    if size % 2 == 0:
                        yield Cut(expr.name, tensor.name, dim, (2, size // 2), "product")

    def wrong(self, split: Split) -> str | None:
        """What is wrong under the split, None where every part is right."""
        graph, factors = self._analysed()
        op = factors.ops[0]
        layouts = self._layouts(op, split)
        per_rank = PerRank()
        localize_node(graph, op, layouts, split.mesh, per_rank)
        ranks = range(split.mesh.size)
        parts = [self._run_rank(graph, layouts, split.mesh, per_rank, r) for r in ranks]
        for i, expected in enumerate(self.whole):
            problem = compare_parts(layouts[f"y{i}"], expected, [p[i] for p in parts], split.mesh)
            if problem:
                where = ", ".join(
                    f"{op.leaves[k].factor}: {v[1] or 'even'}" for k, v in split.leaves.items()
                )
                cut = f", {self.cut}" if self.cut else ""
                return (
                    f"{self.case.op} [{op.rule.text()}] over {split.mesh}, {where}{cut}: {problem}"
                )
        return None

    def _layouts(self, op: OpFactors, split: Split) -> dict[str, Layout]:
        """The layouts of operands and results that a split implies."""
        own: Axes = ()
        reduce: Any = "sum"
        for leaf, (axes, _) in split.leaves.items():
            if op.reduction(leaf):
                own, reduce = own + axes, op.reduction(leaf)
        layouts = {}
        count = len(op.node.inputs)
        for i, (tensor, links) in enumerate(op.operands()):
            if tensor.name not in self.factors.tensors:
                continue
            given = iter([split.leaves.get(-1 if k is None else k, ((), None)) for k in links])
            tree: TensorFactors = self.factors.tensors[tensor.name]
            dims = tuple(with_axes(dim, given) for dim in tree.dims)
            pending = own if i >= count or i in op.rule.additive else ()
            layouts[tensor.name] = Layout(dims, pending, reduce)
        return layouts

    def _run_rank(
        self,
        graph: gs.Graph,
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        per_rank: PerRank,
        rank: int,
    ) -> list[Array]:
        feeds = {
            name: layouts[name].take(value, mesh, rank) if name in layouts else value
            for name, value in self.feeds.items()
        }
        feeds |= {name: value(rank) for name, value in per_rank.constants.items()}
        for node in graph.nodes:
            for (name, key), value in per_rank.attributes.items():
                if name == node.name:
                    node.attrs[key] = value(rank)
        return run(graph, feeds)


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


def compare_parts(layout: Layout, expected: Array, parts: list[Array], mesh: Mesh) -> str | None:
    """What is wrong with the ranks' parts of a result."""
    for rank, part in enumerate(parts):
        if part.shape != layout.local_shape(mesh, rank):
            return f"rank {rank} makes {part.shape}, not {layout.local_shape(mesh, rank)}"
        if not layout.partial and not close(part, layout.take(expected, mesh, rank), expected):
            return f"rank {rank} makes other values than {layout.text(mesh)} of the whole"
    if layout.partial and not close(layout.assemble(parts, mesh), expected):
        return f"{layout.text(mesh)} does not reduce to the whole"
    return None


def close(
    have: Array, want: Array, scale: Array | None = None, tolerance: float | None = None
) -> bool:
    """Whether two arrays agree up to rounding, relative to the largest value."""
    if have.shape != want.shape or have.dtype != want.dtype:
        return False
    if tolerance is None:
        tolerance = TOLERANCE.get(str(want.dtype), 0.0)
    if not np.issubdtype(want.dtype, np.floating) or not want.size:
        return bool((have == want).all())
    scale = want if scale is None else scale
    finite = np.isfinite(want)
    largest = float(np.abs(scale[np.isfinite(scale)]).max(initial=1e-3))
    same = np.array_equal(have[~finite], want[~finite], equal_nan=True)
    return same and bool(np.allclose(have[finite], want[finite], rtol=0, atol=tolerance * largest))
