"""Which cores and threads ranks get, on descriptions of machines as Linux gives them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from runtime.bundles import k_split, pids

from onnxpar.base.errors import InputError
from onnxpar.runtime.launch.launched_rank import _share
from onnxpar.runtime.ranks.cores import (
    BINDINGS,
    Core,
    Share,
    own_cores,
    share_beside,
    shares,
    shares_of_replica,
)
from onnxpar.runtime.ranks.groups import World, thread_worlds
from onnxpar.runtime.session.session import InferenceSession

pytestmark = pytest.mark.processes


def machine(
    folder: Path, nodes: int, cores: int, hyperthreads: int, offline: Iterable[int] = ()
) -> Path:
    """What Linux tells of a machine: so many nodes of so many cores; the second hardware threads of
    all cores follow the first ones. Lists lack what is offline."""
    total = nodes * cores
    online = sorted({*range(total * hyperthreads)} - {*offline})
    for node in range(nodes):
        own = [thread for thread in online if thread % total // cores == node]
        at = folder / f"node/node{node}"
        at.mkdir(parents=True)
        (at / "cpulist").write_text(as_linux(own) + "\n")
    for thread in online:
        at = folder / f"cpu/cpu{thread}/topology"
        at.mkdir(parents=True)
        siblings = [other for other in online if other % total == thread % total]
        (at / "thread_siblings_list").write_text(",".join(map(str, siblings)) + "\n")
    return folder


def as_linux(numbers: list[int]) -> str:
    """A list such as `0-3,8`."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def plain(threads: Iterable[int], node: int = 0) -> list[Core]:
    return [Core(node, (thread,)) for thread in threads]


def bound(found: list[Share]) -> list[tuple[int, ...]]:
    return [share.cores for share in found]


def test_shares_of_one_node() -> None:
    assert shares(2, cores=plain(range(8))) == [
        Share((0, 1, 2, 3), 4, True),
        Share((4, 5, 6, 7), 4, True),
    ]
    assert shares(3, cores=plain(range(8))) == [
        Share((0, 1, 2), 3, True),
        Share((3, 4, 5), 3, True),
        Share((6, 7), 2, True),
    ]
    assert shares(2, cores=plain([4, 9])) == [Share((), 1, True)] * 2
    assert shares(3, cores=plain([4, 9])) == [Share((), 1, False)] * 3


def test_cores_of_linux(tmp_path: Path) -> None:
    """All of them, those of a cpuset, and without a description."""
    system = machine(tmp_path, nodes=2, cores=2, hyperthreads=2)
    both = [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7))]
    assert own_cores(system, range(8)) == both
    assert own_cores(system, [1, 6, 7]) == [Core(0, (1,)), Core(1, (6,)), Core(1, (7,))]
    assert own_cores(tmp_path / "elsewhere", [3, 5]) == [Core(0, (3,)), Core(0, (5,))]


def test_what_is_offline(tmp_path: Path) -> None:
    """A core without its second hardware thread, a whole core, and a node without cores."""
    system = machine(tmp_path, nodes=3, cores=2, hyperthreads=2, offline=[6, 1, 7, 2, 3, 8, 9])
    assert (system / "node/node1/cpulist").read_text() == "\n"
    cores = own_cores(system, [0, 4, 5, 10, 11])
    assert cores == [Core(0, (0,)), Core(2, (4, 10)), Core(2, (5, 11))]
    assert shares(1, cores=cores) == [Share((0, 4, 5, 10, 11), 3, True)]
    two = (4, 5, 10, 11)
    assert shares(2, cores=cores) == [Share((0,), 1, True), Share(two, 2, True)]
    assert shares(3, cores=cores) == [Share((0,), 1, True)] + [Share(two, 1, True)] * 2
    more = [Share((0,), 1, True), Share((4, 10), 2, True)] + [Share(two, 1, True)] * 2
    assert shares(4, cores=cores) == more


def test_ranks_stay_on_a_node(tmp_path: Path) -> None:
    """A thread for each core, and memory of one node."""
    cores = own_cores(machine(tmp_path, nodes=2, cores=2, hyperthreads=2), range(8))
    first, second = (0, 1, 4, 5), (2, 3, 6, 7)
    assert shares(2, cores=cores) == [Share(first, 2, True), Share(second, 2, True)]
    assert shares(4, cores=cores) == [Share(first, 1, True)] * 2 + [Share(second, 1, True)] * 2
    assert shares(8, cores=cores) == [Share(first, 1, True)] * 4 + [Share(second, 1, True)] * 4
    assert shares(9, cores=cores) == [Share(first, 1, False)] * 5 + [Share(second, 1, True)] * 4


def test_four_nodes(tmp_path: Path) -> None:
    """Fewer ranks than nodes have whole ones; more of them are neighbours on a node."""
    cores = own_cores(machine(tmp_path, nodes=4, cores=4, hyperthreads=2), range(32))
    nodes = [(*range(n, n + 4), *range(n + 16, n + 20)) for n in (0, 4, 8, 12)]
    two = [tuple(sorted(nodes[n] + nodes[n + 1])) for n in (0, 2)]
    assert shares(1, cores=cores) == [Share(tuple(range(32)), 16, True)]
    assert shares(2, cores=cores) == [Share(own, 8, True) for own in two]
    assert bound(shares(3, cores=cores)) == [two[0], *nodes[2:]]
    assert shares(4, cores=cores) == [Share(own, 4, True) for own in nodes]
    assert [s.threads for s in shares(6, cores=cores)] == [2, 2, 2, 2, 4, 4]
    assert bound(shares(8, cores=cores))[:3] == [(0, 1, 16, 17), (2, 3, 18, 19), (4, 5, 20, 21)]
    assert shares(16, cores=cores) == [Share(own, 1, True) for own in nodes for _ in range(4)]


def test_a_cpuset_with_parts_of_nodes() -> None:
    """Each rank is where it gets most cores."""
    cores = plain(range(6)) + plain([6, 7], node=1)
    assert [s.threads for s in shares(1, cores=cores)] == [8]
    assert bound(shares(2, cores=cores)) == [(0, 1, 2), (3, 4, 5)]
    assert bound(shares(3, cores=cores)) == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert bound(shares(4, cores=cores)) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_ranks_per_numa(tmp_path: Path) -> None:
    cores = own_cores(machine(tmp_path, nodes=4, cores=4, hyperthreads=1), range(16))
    nodes = [tuple(range(n, n + 4)) for n in (0, 4, 8, 12)]
    assert shares(3, per_node=1, cores=cores) == [Share(own, 4, True) for own in nodes[:3]]
    assert bound(shares(4, per_node=2, cores=cores)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert shares(5, per_node=4, cores=cores) == [
        *[Share(nodes[0], 1, True)] * 4,
        Share(nodes[1], 4, True),
    ]
    assert shares(8, "numa", 8, cores)[0] == Share(nodes[0], 1, False)
    says = r"ranks_per_numa 2: .* may use 4 NUMA nodes, which hold 8 .* has 9; give 3 or more"
    with pytest.raises(InputError, match=says):
        shares(9, per_node=2, cores=cores)
    assert shares(2, per_node=2, cores=plain(range(4))) == shares(2, cores=plain(range(4)))


def test_what_ranks_are_bound_to(tmp_path: Path) -> None:
    cores = own_cores(machine(tmp_path, nodes=2, cores=2, hyperthreads=1), range(4))
    for ranks, each in ((2, [(0, 1), (2, 3)]), (3, [(0, 1), (0, 1), (2, 3)])):
        for bind in ("cores", "numa"):
            assert bound(shares(ranks, bind, cores=cores)) == each
        assert bound(shares(ranks, "none", cores=cores)) == [()] * ranks
    one = {bind: bound(shares(2, bind, cores=plain(range(4)))) for bind in BINDINGS}
    assert one == {"cores": [(0, 1), (2, 3)], "numa": [(), ()], "none": [(), ()]}
    assert [s.threads for s in shares(2, "none", cores=cores)] == [2, 2]


def test_ranks_of_a_launcher_divide_what_they_have_in_common() -> None:
    """Be it the machine, a container, or what the launcher binds some of them to."""
    four = plain(range(4))
    assert share_beside(1, four) == Share((), 4, True)
    assert share_beside(3, four) == Share((), 1, True)
    assert share_beside(5, four) == Share((), 1, False)
    assert share_beside(2, [Core(0, (0, 4)), Core(0, (1, 5))]) == Share((), 1, True)
    allowed = sorted(os.sched_getaffinity(0))
    sets = [{allowed[0]}, {allowed[0]}, {*allowed}]

    def share(world: World) -> Share:
        os.sched_setaffinity(0, sets[world.rank])  # of this thread
        return _share(world)

    worlds = thread_worlds(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(share, worlds))
    for world in worlds:
        world.close()
    if len(allowed) > 1:
        assert found[:2] == [Share((), 1, False)] * 2
        assert found[2] == Share((), len(own_cores()), True)


@pytest.mark.slow
def test_replicas_divide_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session has its own; and asks for those of its number."""
    cores = [Core(0, (thread,)) for thread in range(8)]
    monkeypatch.setattr("onnxpar.runtime.ranks.cores.own_cores", lambda: cores)
    each = [shares_of_replica(2, "cores", 0, replica, 2) for replica in range(2)]
    assert [[share.cores for share in own] for own in each] == [
        [(0, 1), (2, 3)],
        [(4, 5), (6, 7)],
    ]
    asked: list[tuple[object, ...]] = []

    def asking(*args: object) -> list[Share]:
        asked.append(args)
        return [Share((), 1, False)] * 2

    monkeypatch.setattr("onnxpar.runtime.ranks.ranks.shares_of_replica", asking)
    par = k_split(tmp_path / "m.par")
    InferenceSession(par, replica=1, replicas=3, bind="numa").close()
    InferenceSession(par).close()
    assert asked == [(2, "numa", 0, 1, 3), (2, "cores", 0, 0, 1)]
    with pytest.raises(InputError, match="replica 2 of 2: give a number from 0 to replicas - 1"):
        InferenceSession(par, replica=2, replicas=2)


def test_a_session_places_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    par = k_split(tmp_path / "model.par")
    with InferenceSession(par, ranks_per_numa=2) as session:
        assert len(pids(session)) == 2
    if len({core.node for core in own_cores()}) == 1:
        with pytest.raises(InputError, match="which hold 1 ranks then, but the model has 2"):
            InferenceSession(par, ranks_per_numa=1)
    monkeypatch.setenv("ONNXPAR_RANK", "0")
    monkeypatch.setenv("ONNXPAR_WORLD_SIZE", "2")
    monkeypatch.setenv("ONNXPAR_STORE", f"file:{tmp_path}/store")
    with pytest.raises(InputError, match="mpirun --map-by ppr:1:numa --bind-to numa"):
        InferenceSession(par, ranks_per_numa=1)
