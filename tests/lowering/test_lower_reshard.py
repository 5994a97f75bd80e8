"""Reshards as the runtime runs them: from any placement of a tensor to any other, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.base.names import Names
from onnxpar.compiler.pass_ import LoweredState
from onnxpar.cost.cost import Costs
from onnxpar.cost.topology import Topology
from onnxpar.graph.per_rank import PerRank
from onnxpar.graph.reshards import Reshard, reshard_node
from onnxpar.layout.layout import Concat, Dim, Factor, Layout, Product, nested_parts
from onnxpar.layout.mesh import Axes, Axis, Mesh, parts_over
from onnxpar.lowering.lower_reshard import ReshardBuilder
from onnxpar.passes.lower.order_collectives import OrderCollectives
from onnxpar.passes.write.split_ranks import _export, _instantiate
from onnxpar.runtime.ranks.groups import World, session_options, thread_worlds
from onnxpar.sharding.factors import Leaf, TensorFactors, with_axes
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.reshard_planner import ReshardedTensor, plan_steps
from onnxpar.sharding.state import FactorSharding, overlaps

RANKS = 4
FOUR = Mesh((("t", 4),))
SQUARE = Mesh((("a", 2), ("b", 2)))
AXES: dict[Mesh, list[Axes]] = {
    FOUR: [(), (Axis("t", 4),), (Axis("t", 2),), (Axis("t", 2, 2),)],
    SQUARE: [
        (),
        (Axis("a", 2),),
        (Axis("b", 2),),
        (Axis("a", 2), Axis("b", 2)),
        (Axis("b", 2), Axis("a", 2)),
    ],
}
Hand = dict[tuple[int, Axes], tuple[int, ...]]


def factors(dims: tuple[Dim, ...], apart: Sequence[tuple[int, int]] = ()) -> TensorFactors:
    """The factors of a tensor with these dimensions, an atom per leaf."""

    def sizes(dim: Dim) -> list[int]:
        if isinstance(dim, Factor):
            return [dim.size]
        return [s for c in dim.children for s in sizes(c)]

    of_leaf = [(i, size) for i, dim in enumerate(dims) for size in sizes(dim)]
    leaves = tuple(Leaf(n, size) for n, (_, size) in enumerate(of_leaf))
    pairs = frozenset({*apart, *((j, i) for i, j in apart)})
    return TensorFactors(dims, leaves, tuple(i for i, _ in of_leaf), pairs)


TENSORS = [
    factors((Factor(5), Factor(6))),
    factors((Product((Factor(4), Factor(5))), Factor(7))),
    factors((Concat((Factor(4), Factor(6))), Factor(5)), [(0, 1)]),
    factors((Concat((Product((Factor(4), Factor(2))), Factor(5))), Factor(6)), [(0, 2), (1, 2)]),
    factors((Product((Factor(3), Factor(4), Factor(2))), Factor(4))),
]


@st.composite
def factor_shardings(draw: st.DrawFn, mesh: Mesh, tensor: TensorFactors) -> FactorSharding:
    """Axes on some leaves, none used twice but by segments; pending over some that are left."""
    leaves: list[Axes] = []
    for i, leaf in enumerate(tensor.leaves):
        used = [a for j, over in enumerate(leaves) if (i, j) not in tensor.apart for a in over]
        fitting = [o for o in AXES[mesh] if parts_over(o) <= leaf.size and not overlaps(o, used)]
        leaves.append(draw(st.sampled_from(fitting)))
    taken = [a for over in leaves for a in over]
    pending = draw(st.sampled_from([o for o in AXES[mesh] if not overlaps(o, taken)]))
    return FactorSharding(tuple(leaves), pending, draw(st.sampled_from(["sum", "max"])))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, TensorFactors, FactorSharding, FactorSharding, Hand]:
    mesh = draw(st.sampled_from([FOUR, SQUARE]))
    tensor = draw(st.sampled_from(TENSORS))
    start, goal = draw(factor_shardings(mesh, tensor)), draw(factor_shardings(mesh, tensor))
    hand: Hand = {}
    for factor_sharding in (start, goal):
        for leaf, axes in enumerate(factor_sharding.leaves):
            if axes and draw(st.integers(0, 3)) == 0:
                size, count = tensor.leaves[leaf].size, parts_over(axes)
                spread = sorted(draw(st.integers(0, size - count)) for _ in range(count - 1))
                cuts = np.diff([0, *spread, size - count]) + 1
                hand[leaf, axes] = tuple(cuts.tolist())
    return mesh, tensor, start, goal, hand


def layout(tensor: TensorFactors, factor_sharding: FactorSharding, hand: Hand) -> Layout:
    """The placement as a layout."""
    given_axes = iter([(a, hand.get((i, a))) for i, a in enumerate(factor_sharding.leaves)])
    dims = tuple(with_axes(d, given_axes) for d in tensor.dims)
    return Layout(dims, factor_sharding.partial, factor_sharding.reduce)


def part_sizes(tensor: TensorFactors, hand: Hand, leaf: int, axes: Axes) -> tuple[int, ...]:
    """Sizes of the parts of a leaf."""
    default = nested_parts(tensor.leaves[leaf].size, tuple(a.size for a in axes))
    return hand.get((leaf, axes), default)


def terms(whole: np.ndarray, how: Layout, mesh: Mesh) -> list[np.ndarray]:
    """Each rank's part; of what is pending, terms that only together are the value."""
    parts = [how.take(whole, mesh, rank) for rank in range(RANKS)]
    if how.partial and how.reduce == "sum":
        noise = [np.random.default_rng(r).integers(0, 9, p.shape) for r, p in enumerate(parts)]
        for rank in range(RANKS):
            group = list(mesh.group(how.partial, rank))
            following = group[(group.index(rank) + 1) % len(group)]
            parts[rank] = (parts[rank] + noise[rank] - noise[following]).astype(whole.dtype)
    return parts


def lower(
    steps: Sequence[Any], tensor: TensorFactors, mesh: Mesh, hand: Hand
) -> tuple[gs.Graph, PerRank]:
    """The steps as the graph that every rank runs."""
    per_rank = PerRank()
    tensors = [gs.Variable(f"t{i}", np.float32) for i in range(len(steps) + 1)]
    nodes: list[gs.Node] = []
    for i, step in enumerate(steps):
        layouts = (layout(tensor, step.before, hand), layout(tensor, step.after, hand))
        reshard = Reshard(step.kind, step.axes, (layouts,))
        node = reshard_node(f"{step.kind}{i}", reshard, [tensors[i]], [tensors[i + 1]])
        nodes += ReshardBuilder(node, mesh, per_rank, i + 1).build()
    tensors[0].shape = [0, 0]
    tensors[-1].shape = [0, 0]
    graph = gs.Graph(nodes, [tensors[0]], [tensors[-1]], opset=18)
    graph.ir_version = 8
    return graph, per_rank


def run(
    graph: gs.Graph, ctx: Any, worlds: list[World], parts: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The result of every rank."""
    OrderCollectives().run(graph, ctx)
    template = _export(graph, SimpleNamespace(header=onnx.ModelProto(), fused=()))

    def one(rank: int) -> np.ndarray:
        model = type(template).FromString(template.SerializeToString())
        _instantiate(model, ctx, {}, rank)
        options = session_options(worlds[rank], quiet())
        session = ort.InferenceSession(model.SerializeToString(), options)
        return np.asarray(session.run(None, {"t0": parts[rank]})[0])

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def quiet() -> ort.SessionOptions:
    """One thread, no log."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return options


@pytest.fixture(scope="module")
def worlds() -> Iterator[list[World]]:
    made = thread_worlds(RANKS, timeout=30)
    yield made
    for world in made:
        world.close()


def test_any_placement_becomes_any_other(worlds: list[World]) -> None:
    @given(cases())
    def check(case: tuple[Mesh, TensorFactors, FactorSharding, FactorSharding, Hand]) -> None:
        mesh, tensor, start, goal, hand = case
        source, target = layout(tensor, start, hand), layout(tensor, goal, hand)
        whole = np.random.default_rng(1).integers(-50, 50, source.shape).astype(np.float32)
        costs = Costs(Topology.default(), mesh)
        about = ReshardedTensor(tensor, costs, parts=partial(part_sizes, tensor, hand))
        steps = plan_steps(start, goal, about)
        if not steps:
            return
        graph, per_rank = lower(steps, tensor, mesh, hand)
        layouts = {"t0": source, f"t{len(steps)}": target}
        sharding = SimpleNamespace(mesh=mesh, factors=GraphFactors({}, []))
        lowered = LoweredState(per_rank=per_rank)
        names = SimpleNamespace(names=Names())
        ctx = SimpleNamespace(layouts=layouts, sharding=sharding, lowered=lowered, model=names)
        parts = run(graph, ctx, worlds, terms(whole, source, mesh))
        for rank, part in enumerate(parts):
            assert part.shape == target.local_shape(mesh, rank)
        np.testing.assert_array_equal(target.assemble(parts, mesh), whole)

    check()
