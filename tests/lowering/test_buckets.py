"""Which all-reduces are fused: by size, by cost, and never those that wait for each other."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowering.test_schedule import Tensors, node

from onnxpar.cost.cost import Costs
from onnxpar.cost.topology import HOST, Topology
from onnxpar.graph.reshards import Reshard, reshard_of, set_reshard
from onnxpar.layout.layout import Factor, Layout
from onnxpar.layout.mesh import Axes, Mesh
from onnxpar.lowering.buckets import first_of_buckets, fuse_collectives

MESH = Mesh.parse("dp=2,tp=2")
DP, TP = ((MESH.axis(name),) for name in ("dp", "tp"))
BOTH = (*DP, *TP)
COSTS = Costs(Topology.default(), MESH)


def pending(size: int, axes: Axes, reduce: str = "sum") -> Layout:
    return Layout((Factor(size),), axes, reduce)


def build(lines: Sequence[str], **how: Any) -> gs.Graph:
    """Nodes as in `node`; `size`, `axes` and `reduce` say what is reduced, by result."""
    tensors = Tensors()
    made = gs.Graph([node(line, tensors) for line in lines])
    for one in made.nodes:
        if one.op == "AllReduce":
            axes = how.get("axes", {}).get(one.name, DP)
            size = how.get("size", {}).get(one.name, 1)
            one.inputs[0].shape = [size]
            one.inputs[0].dtype = how.get("dtype", {}).get(one.name, np.float32)
            reduce = how.get("reduce", {}).get(one.name, "sum")
            before = pending(size, axes, reduce)
            layouts = (before, Layout((Factor(size),)))
            set_reshard(one, Reshard("AllReduce", axes, (layouts,)))
    return made


def fused(
    made: gs.Graph,
    limit: int = 1 << 30,
    first: Sequence[str] = (),
    wanted: Mapping[str, object] | None = None,
) -> list[str]:
    """The all-reduces that are left, as the tensors that each reduces; none reads what comes
    behind it."""
    fuse_collectives(made, MESH, limit, {}, wanted or {}, first)
    done: set[str] = set()
    makers = {t.name for n in made.nodes for t in n.outputs}
    for one in made.nodes:
        assert all(t.name in done or t.name not in makers for t in one.inputs), one.name
        done |= {t.name for t in one.outputs}
    return [" ".join(t.name for t in n.inputs) for n in made.nodes if n.op == "AllReduce"]


GRADIENTS = [
    "a = matmul x u",
    "a@ = reduce a",
    "b = matmul x v",
    "b@ = reduce b",
    "c = matmul x w",
    "c@ = reduce c",
    "y = sum a@ b@ c@",
]


def test_those_that_do_not_wait_for_each_other_are_one() -> None:
    made = build(GRADIENTS)
    assert fused(made) == ["a b c"]
    assert [n.name for n in made.nodes] == ["a", "b", "c", "a@", "y"]
    (one,) = [n for n in made.nodes if n.op == "AllReduce"]
    assert [t.name for t in one.outputs] == ["a@", "b@", "c@"]
    assert len(reshard_of(one).members) == 3


def test_what_is_fused_is_not_fused_again() -> None:
    made = build([*GRADIENTS, "d = matmul y w", "d@ = reduce d"])
    assert fused(made, limit=24) == ["a b c", "d"]
    assert fused(made) == ["a b c", "d"]


def test_a_bucket_takes_no_more_than_its_size() -> None:
    sizes = {"size": {"a@": 25, "b@": 50, "c@": 100}}
    assert fused(build(GRADIENTS, **sizes), 300) == ["a b", "c"]
    assert fused(build(GRADIENTS, **sizes), 600) == ["a b", "c"]
    assert fused(build(GRADIENTS, **sizes), 700) == ["a b c"]
    assert fused(build(GRADIENTS, **sizes), 1) == ["a", "b", "c"]


def test_buckets_begin_where_they_are_told_to() -> None:
    assert fused(build(GRADIENTS), first=["b@"]) == ["a", "b c"]
    assert fused(build(GRADIENTS), first=["a@", "c@"]) == ["a b", "c"]


def test_only_those_of_one_kind_are_one() -> None:
    """Of other axes, another reduction, another type, or for another purpose."""
    assert fused(build(GRADIENTS, axes={"b@": TP})) == ["b", "a c"]
    assert fused(build(GRADIENTS, reduce={"b@": "max"})) == ["b", "a c"]
    assert fused(build(GRADIENTS, dtype={"b@": np.float64})) == ["b", "a c"]
    assert fused(build(GRADIENTS), wanted={"b@": "gradient"}) == ["b", "a c"]


def test_what_waits_for_another_is_apart() -> None:
    lines = ["a = matmul x u", "a@ = reduce a", "b = relu a@", "c = matmul b v", "c@ = reduce c",
             "d = matmul x w", "d@ = reduce d", "y = sum c@ d@"]  # fmt: skip
    assert fused(build(lines)) == ["a", "c d"]


CIRCLE = ["a1 = matmul x u", "a1@ = reduce a1", "b2 = matmul x v", "b2@ = reduce b2",
          "b1 = relu a1@", "b1@ = reduce b1", "a2 = relu b2@", "a2@ = reduce a2",
          "y = sum b1@ a2@"]  # fmt: skip
OLDER = ["b2 = matmul x v", "b2@ = reduce b2", "late = relu b2@", "a1 = matmul x u",
         "a1@ = reduce a1", "b1 = relu a1@", "b1@ = reduce b1", "a2 = relu late",
         "a2@ = reduce a2", "y = sum b1@ a2@"]  # fmt: skip


@pytest.mark.parametrize("lines", [CIRCLE, OLDER], ids=["circle", "older"])
def test_buckets_do_not_wait_for_each_other_in_a_circle(lines: list[str]) -> None:
    """a1 before b1 and b2 before a2: each pair alone could be one, but not both; nor where a2
    depends on b2 by a tensor that is older than b1, and was computed before the bucket grew."""
    found = fused(build(lines, axes={"b1@": TP, "b2@": TP}))
    assert sorted(found) == ["a1", "a2", "b2 b1"]


def test_circles_of_three() -> None:
    """a before b, b before c, c before a."""
    axes = {"b1@": TP, "b2@": TP, "c1@": BOTH, "c2@": BOTH}
    lines = ["a1 = matmul x u", "a1@ = reduce a1", "b1 = matmul x v", "b1@ = reduce b1",
             "c1 = matmul x w", "c1@ = reduce c1", "b2 = relu a1@", "b2@ = reduce b2",
             "c2 = relu b1@", "c2@ = reduce c2", "a2 = relu c1@", "a2@ = reduce a2",
             "y = sum a2@ b2@ c2@"]  # fmt: skip
    found = fused(build(lines, axes=axes))
    assert sorted(found) == ["a1", "a2", "b1 b2", "c1 c2"]


def test_a_bucket_that_grows_after_it_waits_for_another() -> None:
    """a2 waits for b1, so b2, which waits for a3, is not sent with b1."""
    lines = ["b1 = matmul x v", "b1@ = reduce b1", "a2 = relu b1@", "a2@ = reduce a2",
             "a3 = matmul x u", "a3@ = reduce a3", "b2 = relu a3@", "b2@ = reduce b2",
             "y = sum a2@ b2@"]  # fmt: skip
    found = fused(build(lines, axes={"b1@": TP, "b2@": TP}))
    assert sorted(found) == ["a2 a3", "b1", "b2"]


@pytest.mark.parametrize("seed", range(50))
def test_buckets_of_random_graphs_have_an_order(seed: int) -> None:
    draw = random.Random(seed)
    lines, axes = ["t0 = relu x"], {}
    for i in range(1, 16):
        lines += [f"t{i} = sum t{draw.randrange(i)} r{draw.randrange(i)}", f"r{i} = reduce t{i}"]
        axes[f"r{i}"] = draw.choice([DP, TP, BOTH])
    lines.insert(1, "r0 = relu t0")
    left = fused(build(lines, axes=axes))
    assert sorted(" ".join(left).split()) == sorted(f"t{i}" for i in range(1, 16))


def firsts(
    seconds: Mapping[str, float], sizes: Mapping[str, int], limit: int = 1 << 40
) -> set[str]:
    made = build(GRADIENTS, size=sizes)
    return first_of_buckets(made, COSTS, seconds, lambda op: limit, {}, {}, 1.0)


SIZE = 1_000_000
EACH, LATENCY = 4 * SIZE / HOST.bandwidth, 2 * HOST.latency
"""Over 2 ranks, all bytes are sent once."""
SIZES = dict.fromkeys(("a@", "b@", "c@"), SIZE)


def test_by_cost_one_bucket_where_nothing_is_computed_meanwhile() -> None:
    assert firsts({}, SIZES) == {"a@"}
    assert firsts({"a": 1.0}, SIZES) == {"a@"}


def test_by_cost_the_last_bucket_ends_first() -> None:
    """While c is computed, two buckets are sent, or one of both, which takes less."""
    assert firsts({"a": 1.0, "b": 1.0, "c": 1.0}, SIZES) == {"a@", "c@"}
    # a is sent while b and c are computed, but b is not sent before c is computed
    assert firsts({"a": 1.0, "b": 1.0, "c": LATENCY / 2}, SIZES) == {"a@", "b@"}
    # all are sent after another: b waits for a, so it is sent with c
    assert firsts({"a": 1.0, "b": LATENCY, "c": LATENCY}, SIZES) == {"a@", "b@"}


def test_by_cost_no_bucket_is_larger_than_the_limit() -> None:
    assert firsts({}, SIZES, 8 * SIZE) == {"a@", "b@"}
    assert firsts({}, SIZES, 8 * SIZE - 1) == {"a@", "b@", "c@"}
    assert firsts({}, SIZES, 1) == {"a@", "b@", "c@"}


def test_by_cost_a_bucket_has_a_part_of_all() -> None:
    made = build(GRADIENTS, size=SIZES)
    for share, expected in ((0.7, {"a@", "b@"}), (0.6, {"a@", "b@", "c@"})):
        assert first_of_buckets(made, COSTS, {}, lambda op: 1 << 40, {}, {}, share) == expected


def test_by_cost_each_kind_has_buckets_of_its_own() -> None:
    made = build(GRADIENTS, axes={"b@": TP})
    assert first_of_buckets(made, COSTS, {}, lambda op: 1 << 40, {}, {}, 1.0) == {"a@", "b@"}


def end_of(firsts: set[str], seconds: Sequence[float], sizes: Sequence[int]) -> float:
    """When the last bucket has been sent."""
    free = clock = waiting = 0.0
    for i, (took, size) in enumerate(zip(seconds, sizes, strict=True)):
        clock += took
        waiting += 4 * size
        if i + 1 == len(sizes) or f"g{i + 1}@" in firsts:
            free = max(free, clock) + COSTS.collective("AllReduce", DP, waiting)
            waiting = 0.0
    return free


@given(st.data())
def test_by_cost_no_other_buckets_end_earlier(data: st.DataObject) -> None:
    """All ways to cut seven gradients are tried; no way that ends as early has a larger last
    bucket."""
    count = data.draw(st.integers(1, 7))
    names = [f"g{i}" for i in range(count)]
    scale = data.draw(st.sampled_from([1e-5, 1e-4, 1e-3]))
    seconds = [scale * data.draw(st.integers(0, 9)) for _ in names]
    sizes = [data.draw(st.sampled_from([1, 1000, 60_000, 10**6])) for _ in names]
    lines = [line for n in names for line in (f"{n} = matmul x u", f"{n}@ = reduce {n}")]
    made = build(
        [*lines, f"y = sum {'@ '.join(names)}@"],
        size=dict(zip(names_of(names), sizes, strict=True)),
    )
    compute = dict(zip(names, seconds, strict=True))
    found = first_of_buckets(made, COSTS, compute, lambda op: 1 << 40, {}, {}, 1.0)
    own = end_of(found, seconds, sizes)
    cuts = [
        {"g0@", *chosen}
        for many in range(count)
        for chosen in combinations(names_of(names)[1:], many)
    ]
    ends = [(end_of(cut, seconds, sizes), max(map(number, cut))) for cut in cuts]
    least = min(end for end, _ in ends)
    assert own == pytest.approx(least)
    assert max(map(number, found)) == min(at for end, at in ends if end <= least * (1 + 1e-9))


def names_of(tensors: Sequence[str]) -> list[str]:
    return [f"{name}@" for name in tensors]


def number(name: str) -> int:
    return int(name[1:-1])
