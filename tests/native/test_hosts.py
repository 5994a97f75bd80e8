"""Collectives over several hosts: members of a host combine what they have before it crosses.

Hosts are simulated: ranks r // ranks_per_host that are equal are one host. Messages go through
shared memory or Gloo all the same, as the medium says; tests/hosts has real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from native.ranks import TOKEN, collective, errors_on_ranks, on_ranks, session
from native.test_reductions import fold, onnx_type, random
from onnx import TensorProto

from onnxpar.runtime.ranks.collectives import all_reduce
from onnxpar.runtime.ranks.groups import Group, World, thread_worlds


@dataclass(frozen=True)
class Case:
    """Ranks of a world, the number on each host, and the group that runs collectives."""

    ranks: int
    per_host: int
    group: tuple[int, ...]

    def hosts(self) -> list[list[int]]:
        """The members by host, in the order of first members."""
        found: dict[int, list[int]] = {}
        for member, rank in enumerate(self.group):
            found.setdefault(rank // self.per_host, []).append(member)
        return list(found.values())


CASES = [
    pytest.param(Case(4, 2, (0, 1, 2, 3)), id="2x2"),
    pytest.param(Case(8, 4, tuple(range(8))), id="2x4"),
    pytest.param(Case(6, 2, (0, 1, 2, 3, 4, 5)), id="3x2"),
    pytest.param(Case(4, 3, (0, 1, 2, 3)), id="3+1"),
    pytest.param(Case(6, 2, (0, 2, 4, 5)), id="1+1+2"),
    pytest.param(Case(7, 4, (6, 1, 4, 0, 5, 2)), id="in another order"),
    pytest.param(Case(4, 2, (2, 3)), id="one host"),
    pytest.param(Case(6, 2, (5, 0, 2)), id="one rank each"),
]
LENGTHS = [0, 1, 7, 1001, 20_000, 400_003]
"""From nothing, over one step, to many chunks of parts that are not equal."""


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def worlds(case: Case, medium: str) -> Iterator[list[World]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXPAR_LINK", f"latency=1us,ranks_per_host={case.per_host}")
        made = thread_worlds(case.ranks, timeout=60)
    yield [made[rank] for rank in case.group]
    for world in made:
        world.close()


def by_host(case: Case, op: str, xs: Sequence[np.ndarray]) -> np.ndarray:
    """What members have is combined host by host, and then over hosts."""
    return fold(op, [fold(op, [xs[member] for member in host]) for host in case.hosts()])


def results(
    case: Case, worlds: Sequence[World], kind: str, xs: Sequence[np.ndarray], **attributes: object
) -> list[np.ndarray]:
    """Output Y of each member, of a collective of the case's group on the members' operands."""
    dtype = onnx_type(xs[0].dtype)
    shape = [None] * xs[0].ndim
    made = collective(kind, dtype, shape, group=list(case.group), **attributes)

    def run(world: World) -> np.ndarray:
        x = xs[case.group.index(world.rank)]
        return session(world, made).run(["Y"], {"X": x, "t": TOKEN})[0]  # type: ignore[no-any-return]

    return on_ranks(worlds, run)


@pytest.mark.matrix
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["f4", "f2", "i1", "?"])
def test_all_reduce(case: Case, worlds: list[World], name: str, length: int) -> None:
    xs = [random(np.dtype(name), [length], member) for member in range(len(case.group))]
    for y in results(case, worlds, "AllReduce", xs):
        np.testing.assert_array_equal(y, by_host(case, "sum", xs))


@pytest.mark.matrix
@pytest.mark.parametrize("op", ["max", "min", "prod"])
@pytest.mark.parametrize("name", ["f8", "i4", "u8"])
def test_other_reductions(case: Case, worlds: list[World], name: str, op: str) -> None:
    xs = [random(np.dtype(name), [70_001], member) for member in range(len(case.group))]
    for y in results(case, worlds, "AllReduce", xs, op=op):
        np.testing.assert_array_equal(y, by_host(case, op, xs))


@pytest.mark.matrix
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(3, 2), (57, 61), (500, 333)])
def test_reduce_scatter_has_the_bits_of_all_reduce(
    case: Case, worlds: list[World], shape: tuple[int, int], axis: int
) -> None:
    """Parts are not equal, and along axis 1 not contiguous; some are empty."""
    xs = [random(np.dtype("f4"), shape, member) for member in range(len(case.group))]
    sizes = [shape[axis] - len(xs) + 1] + [1] * (len(xs) - 1) if shape[axis] >= len(xs) else None
    given = {"sizes": sizes} if sizes else {}
    ys = results(case, worlds, "ReduceScatter", xs, axis=axis, **given)
    whole = by_host(case, "sum", xs)
    np.testing.assert_array_equal(np.concatenate(ys, axis), whole)
    for y in results(case, worlds, "AllReduce", xs):
        np.testing.assert_array_equal(y, whole)


@pytest.mark.matrix
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", [0, 1, 90])
def test_all_gather(case: Case, worlds: list[World], rows: int, axis: int) -> None:
    """Member i has i more rows than member 0."""
    members = len(case.group)
    sizes = [rows + member for member in range(members)]
    shapes = [(size, 700) if axis == 0 else (700, size) for size in sizes]
    xs = [random(np.dtype("f4"), shape, i) for i, shape in enumerate(shapes)]
    for y in results(case, worlds, "AllGather", xs, axis=axis, sizes=sizes):
        np.testing.assert_array_equal(y, np.concatenate(xs, axis))


@pytest.mark.matrix
@pytest.mark.parametrize("length", [0, 1, 1000, 100_003])
def test_broadcast(case: Case, worlds: list[World], length: int) -> None:
    xs = [random(np.dtype("f4"), [length], member) for member in range(len(case.group))]
    for root in range(len(case.group)):
        for y in results(case, worlds, "Broadcast", xs, root=root):
            np.testing.assert_array_equal(y, xs[root])


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [1, 300])
def test_all_to_all(case: Case, worlds: list[World], rows: int) -> None:
    members = len(case.group)
    xs = [random(np.dtype("f4"), (rows * members, 101), member) for member in range(members)]
    ys = results(case, worlds, "AllToAll", xs, split_axis=0, concat_axis=1)
    for i, y in enumerate(ys):
        part = slice(rows * i, rows * (i + 1))
        np.testing.assert_array_equal(y, np.concatenate([x[part] for x in xs], 1))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["f2", "f4"])
def test_a_mean_does_not_overflow_where_its_operands_do_not(
    case: Case, worlds: list[World], name: str
) -> None:
    """The sum of all operands is more than float16 has, and of equal ones the mean is the same."""
    x = np.full([50_000], 40_000, name)
    ys = on_ranks(worlds, lambda world: all_reduce(Group(world, case.group), x, "mean"))
    for y in ys:
        np.testing.assert_allclose(y, x, rtol=2 * np.finfo(name).eps)
        assert y.tobytes() == ys[0].tobytes()


@pytest.mark.matrix
def test_all_runs_give_the_same_bits(case: Case, worlds: list[World]) -> None:
    xs = [random(np.dtype("f4"), [123_457], member) for member in range(len(case.group))]
    runs = [results(case, worlds, "AllReduce", xs) for _ in range(3)]
    assert len({y.tobytes() for ys in runs for y in ys}) == 1


@pytest.mark.parametrize("length", [10, 200_000])
def test_members_that_disagree(medium: str, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Also if the two that disagree exchange no message: the last rank takes the maximum."""
    monkeypatch.setenv("ONNXPAR_LINK", "latency=1us,ranks_per_host=2")
    worlds = thread_worlds(4, timeout=30)

    def run(world: World) -> np.ndarray:
        op = "max" if world.rank == 3 else "sum"
        made = collective("AllReduce", TensorProto.FLOAT, ["n"], op=op)
        return session(world, made).run(["Y"], {"X": np.ones(length, "f4"), "t": TOKEN})[0]  # type: ignore[no-any-return]

    for message in errors_on_ranks(worlds, run):
        assert "the ranks disagree: rank " in message and "rank 3" in message
    for world in worlds:
        world.close()
