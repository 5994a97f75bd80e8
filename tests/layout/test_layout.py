"""Layouts, meshes and reshards on simulated ranks, drawn by Hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.base.errors import StrategyError
from onnxpar.cost.cost import Costs
from onnxpar.cost.topology import Topology
from onnxpar.layout.layout import (
    Concat,
    Dim,
    Factor,
    Layout,
    Product,
    estimated_size,
    first_index,
    indices,
    largest_size,
    leaves,
    local_size,
    nested_parts,
    neutral,
    normalize,
    runs,
)
from onnxpar.layout.mesh import Axis, Mesh, merge_axes
from onnxpar.sharding.factors import Leaf, TensorFactors
from onnxpar.sharding.reshard_planner import ReshardedTensor, plan_steps
from onnxpar.sharding.reshard_steps import ReshardStep
from onnxpar.sharding.state import FactorSharding, covered_axes

Array = np.ndarray[Any, Any]
MESH = Mesh((("a", 2), ("b", 3), ("c", 2)))
WHOLE = [MESH.axis(name) for name, _ in MESH.shape]


def test_nested_parts_put_the_larger_first() -> None:
    assert nested_parts(7, (2, 2)) == (2, 2, 2, 1)
    assert nested_parts(50257, (4,)) == (12565, 12564, 12564, 12564)


@pytest.mark.slow
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_nested_parts_compose_under_gathering(size: int, a: int, b: int) -> None:
    fine = nested_parts(size, (a, b))
    coarse = tuple(sum(fine[i * b : (i + 1) * b]) for i in range(a))
    assert coarse == nested_parts(size, (a,))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_groups_partition_the_ranks(a: int, b: int, c: int) -> None:
    mesh = Mesh((("a", a), ("b", b), ("c", c)))
    for axes in ([mesh.axis("a")], [mesh.axis("c"), mesh.axis("a")], [mesh.axis("b")]):
        seen: set[int] = set()
        for rank in range(mesh.size):
            group = mesh.group(axes, rank)
            assert group[mesh.coordinate(axes, rank)] == rank
            seen |= set(group)
            assert all(mesh.group(axes, other) == group for other in group)
        assert seen == set(range(mesh.size))


def test_an_axis_with_a_coordinate_divides_nothing() -> None:
    mesh = Mesh.parse("dp=2,tp=3")
    dim = Factor(5, (mesh.axis("dp"), Axis("tp", 3, at=1)))
    assert [local_size(dim, mesh, rank) for rank in range(6)] == [0, 3, 0, 0, 2, 0]
    assert [estimated_size(dim, mesh, rank) for rank in range(6)] == [0, 3, 0, 0, 2, 0]
    assert largest_size(dim) == 1  # 5 over 6 ranks: other tensors are on the others
    assert Layout((dim,)).text(mesh) == "[dp.tp@1]"
    joined = merge_axes((Axis("tp", 2, at=1), Axis("tp", 2, 2, at=0)))
    assert joined == (Axis("tp", 4, at=2),)
    assert len(merge_axes((Axis("tp", 2), Axis("tp", 2, 2, at=0)))) == 2


def test_flat_axes_are_sub_axes_of_the_mesh() -> None:
    mesh = Mesh((("dp", 2), ("tp", 4)))
    assert mesh.flat(1, 8) == (Axis("dp", 2), Axis("tp", 4))
    assert mesh.flat(2, 2) == (Axis("tp", 2),)
    assert mesh.flat(4, 2) == (Axis("tp", 2, 2),)
    assert mesh.text(Axis("tp", 2, 2)) == "tp:(2)2"
    with pytest.raises(StrategyError):
        mesh.flat(1, 3)


@pytest.mark.parametrize("text", ["dp", "dp=0", "dp=2,dp=3", "dp=x", ""])
def test_bad_meshes_are_refused(text: str) -> None:
    with pytest.raises(StrategyError, match="mesh"):
        Mesh.parse(text)


@st.composite
def trees(draw: st.DrawFn, depth: int = 2) -> Dim:
    """A dimension of unsplit factors."""
    kind = draw(st.sampled_from(["factor", "product", "concat"])) if depth else "factor"
    if kind == "factor":
        return Factor(draw(st.integers(2, 6)))
    children = tuple(draw(st.lists(trees(depth - 1), min_size=2, max_size=3)))
    return Product(children) if kind == "product" else Concat(children)


def split(dim: Dim, draw: st.DrawFn, free: list[Axis]) -> Dim:
    """Axes on some leaves; segments may share them, factors of a product may not."""
    if isinstance(dim, Factor):
        axes = tuple(a for a in list(free) if draw(st.booleans()))
        for axis in axes:
            free.remove(axis)
        axes = tuple(
            replace(a, at=draw(st.sampled_from([None, None, *range(a.size)]))) for a in axes
        )
        count = int(np.prod([a.size for a in axes]))
        if axes and draw(st.booleans()):
            cuts = sorted(draw(st.integers(0, dim.size)) for _ in range(count - 1))
            parts = tuple(np.diff([0, *cuts, dim.size]).tolist())
            return Factor(dim.size, axes, parts)
        return Factor(dim.size, axes)
    if isinstance(dim, Product):
        return Product(tuple(split(c, draw, free) for c in dim.children))
    used: set[Axis] = set()
    children = []
    for child in dim.children:
        mine = list(free)
        children.append(split(child, draw, mine))
        used |= set(free) - set(mine)
    for axis in used:
        free.remove(axis)
    return Concat(tuple(children))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout of one or two dimensions, perhaps pending over axes that are left."""
    free = list(WHOLE)
    dims = tuple(split(draw(trees()), draw, free) for _ in range(draw(st.integers(1, 2))))
    partial = tuple(a for a in free if draw(st.booleans()))
    return Layout(dims, partial, draw(st.sampled_from(["sum", "max", "min", "prod"])))


@given(layouts())
def test_parts_assemble_to_the_whole(layout: Layout) -> None:
    whole = np.random.default_rng(0).standard_normal(layout.shape).astype(np.float32)
    parts = [layout.take(whole, MESH, rank) for rank in range(MESH.size)]
    for rank, part in enumerate(parts):
        assert part.shape == layout.local_shape(MESH, rank)
    np.testing.assert_array_equal(layout.assemble(parts, MESH), whole)


@given(layouts())
def test_the_short_form_means_the_same(layout: Layout) -> None:
    for dim in layout.dims:
        for rank in range(MESH.size):
            expected = indices(dim, MESH, rank)
            np.testing.assert_array_equal(indices(normalize(dim), MESH, rank), expected)
            assert not len(expected) or first_index(dim, MESH, rank) == expected[0]
            joined = [np.arange(s, s + n) for s, n in runs(dim, MESH, rank)]
            np.testing.assert_array_equal(np.concatenate([np.zeros(0, int), *joined]), expected)
    again = Layout.from_json(layout.to_json())
    assert again.normalized() == layout.normalized()


SUB = Mesh((("t", 4), ("u", 3)))
AXES: list[tuple[Axis, ...]] = [
    (),
    (SUB.axis("t"),),
    (SUB.axis("u"),),
    (SUB.axis("t"), SUB.axis("u")),
    (SUB.axis("u"), SUB.axis("t")),
    (Axis("t", 2),),
    (Axis("t", 2, 2),),
    (Axis("t", 4, at=2),),
    (Axis("t", 4, at=1),),
    (Axis("t", 4, at=3), SUB.axis("u")),
    (Axis("t", 2, 2, at=1),),
    (Axis("u", 3, at=0), Axis("t", 4, at=2)),
]
FACTORS = [
    TensorFactors((Factor(12), Factor(13)), (Leaf(0, 12), Leaf(1, 13)), (0, 1)),
    TensorFactors((Product((Factor(5), Factor(12))),), (Leaf(0, 5), Leaf(1, 12)), (0, 0)),
    TensorFactors(
        (Concat((Factor(12), Factor(14))), Factor(12)),
        (Leaf(0, 12), Leaf(1, 14), Leaf(2, 12)),
        (0, 0, 1),
        frozenset({(0, 1), (1, 0)}),
    ),
]


def legal(
    factors: TensorFactors, axes: Sequence[tuple[Axis, ...]], partial: Sequence[Axis]
) -> bool:
    """Whether no axis is used twice, but by segments."""
    for i, a in enumerate(axes):
        if any(x.overlaps(y) for x in a for y in partial):
            return False
        for j, b in enumerate(axes[:i]):
            if (i, j) not in factors.apart and any(x.overlaps(y) for x in a for y in b):
                return False
    return all(
        int(np.prod([x.size for x in a])) <= leaf.size
        for a, leaf in zip(axes, factors.leaves, strict=True)
    )


@st.composite
def reshards(draw: st.DrawFn) -> tuple[TensorFactors, FactorSharding, FactorSharding]:
    factors = draw(st.sampled_from(FACTORS))
    ends = []
    for _ in range(2):
        axes = draw(
            st.lists(
                st.sampled_from(AXES), min_size=len(factors.leaves), max_size=len(factors.leaves)
            ).filter(lambda a: legal(factors, a, ()))
        )
        unused = [p for p in AXES if legal(factors, axes, p)]
        partial = draw(st.sampled_from(unused))
        ends.append(FactorSharding(tuple(axes), partial))
    return factors, ends[0], ends[1]


def layout_of(factors: TensorFactors, factor_sharding: FactorSharding) -> Layout:
    given_axes = iter(factor_sharding.leaves)

    def put(dim: Dim) -> Dim:
        if isinstance(dim, Factor):
            return Factor(dim.size, next(given_axes))
        return type(dim)(tuple(map(put, dim.children)))

    return Layout(tuple(map(put, factors.dims)), factor_sharding.partial, factor_sharding.reduce)


def holds(before: Layout, source: int, after: Layout, rank: int) -> bool:
    """Whether one rank has before a step just what another has after it."""
    pairs = zip(before.dims, after.dims, strict=True)
    terms = SUB.coordinate(before.partial, source), SUB.coordinate(after.partial, rank)
    return terms[0] == terms[1] and all(
        np.array_equal(indices(b, SUB, source), indices(a, SUB, rank)) for b, a in pairs
    )


def simulate(step: ReshardStep, factors: TensorFactors, parts: list[Array]) -> list[Array]:
    """What a step does, from what its kind promises alone: who talks, and what each has then."""
    before, after = layout_of(factors, step.before), layout_of(factors, step.after)
    out = []
    given: set[int] = set()
    for rank in range(SUB.size):
        group = SUB.group(step.axes, rank)
        if step.kind == "CollectivePermute":
            source = next(m for m in group if m not in given and holds(before, m, after, rank))
            given.add(source)
            out.append(parts[source])
            continue
        if step.kind == "Select":
            keep = SUB.coordinate(step.axes, rank) == 0
            out.append(
                parts[rank] if keep else np.full_like(parts[rank], neutral("sum", parts[0].dtype))
            )
            continue
        members = [rank] if step.kind == "LocalSlice" else list(group)
        reduces = step.kind in ("AllReduce", "ReduceScatter")
        sparse = np.zeros(before.shape, parts[0].dtype)
        have = np.zeros(before.shape, bool)
        for member in members:
            at = np.ix_(*[indices(d, SUB, member) for d in before.dims])
            sparse[at] = sparse[at] + parts[member] if reduces else parts[member]
            have[at] = True
        want = np.ix_(*[indices(d, SUB, rank) for d in after.dims])
        assert have[want].all(), f"{step.kind} does not bring rank {rank} what it needs"
        out.append(sparse[want])
    return out


@given(reshards())
def test_steps_lead_from_any_placement_to_any_other(
    case: tuple[TensorFactors, FactorSharding, FactorSharding],
) -> None:
    factors, start, goal = case
    source, target = layout_of(factors, start), layout_of(factors, goal)
    whole = np.random.default_rng(1).integers(0, 100, source.shape).astype(np.float64)
    parts = [source.take(whole, SUB, rank) for rank in range(SUB.size)]
    if start.partial:  # terms that only together are the value
        noise = [np.random.default_rng(r).integers(0, 9, p.shape) for r, p in enumerate(parts)]
        for rank, part in enumerate(parts):
            group = SUB.group(start.partial, rank)
            following = group[(group.index(rank) + 1) % len(group)]
            parts[rank] = part + noise[rank] - noise[following]
    for step in plan_steps(start, goal, ReshardedTensor(factors, Costs(Topology.default(), SUB))):
        parts = simulate(step, factors, parts)
    np.testing.assert_array_equal(target.assemble(parts, SUB), whole)
    for rank, part in enumerate(parts):
        assert part.shape == target.local_shape(SUB, rank)


def test_reduced_segments_must_all_be_split() -> None:
    tp = (Axis("t", 4),)
    assert covered_axes(Concat((Factor(8, tp), Factor(4)))) is None
    assert covered_axes(Concat((Factor(8, tp), Factor(4, tp)))) == frozenset(tp)
    assert covered_axes(Product((Factor(8, tp), Factor(4)))) == frozenset(tp)


def test_uneven_layout_text() -> None:
    mesh = Mesh((("dp", 2), ("tp", 3)))
    tp = (mesh.axis("tp"),)
    heads = Layout((Factor(5, (mesh.axis("dp"),)), Product((Factor(4, tp), Factor(2)))))
    assert heads.text(mesh) == "[dp, tp{4,2,2}]"
    assert [local_size(heads.dims[1], mesh, r) for r in range(3)] == [4, 2, 2]
    qkv = Layout((Concat((Factor(6, tp), Factor(2), Factor(2))),), (mesh.axis("dp"),))
    assert qkv.text(mesh) == "[tp+4] sum(dp)"
    assert sum(1 for d in qkv.dims for _ in leaves(d)) == 3
