"""Joining, leaving and aborting worlds."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from native import frames
from native.handshakes import Refused, connect
from native.ranks import TOKEN, collective, errors_on_ranks, on_ranks, run, session
from onnx import TensorProto
from runtime.bundles import wait_until

from onnxpar.base.errors import OnnxparError
from onnxpar.runtime.ranks.groups import Hub, World, session_options, thread_worlds
from onnxpar.runtime.ranks.library import library_path

Worlds = Callable[..., list[World]]

ALL_REDUCE = collective("AllReduce", TensorProto.FLOAT, ["n"])


def join(
    store: str, sizes: list[int], timeout: float = 5, ranks: list[int] | None = None
) -> list[Any]:
    """The worlds, or the errors, of ranks that join at the same time."""

    def each(rank: int) -> World | str:
        try:
            id = f"{store}/{rank}/{time.monotonic_ns()}"
            return World.create(id, rank, sizes[rank], store, timeout=timeout)
        except OnnxparError as error:
            return str(error)

    chosen = list(range(len(sizes))) if ranks is None else ranks
    with ThreadPoolExecutor(len(chosen)) as pool:
        return list(pool.map(each, chosen))


def close(worlds: list[World]) -> None:
    for world in worlds:
        world.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def port_of(store: str) -> int:
    return int(store.split("#")[0].split(":")[-1])


def store_of(kind: str, directory: Path) -> str:
    return {
        "hash": f"hash:{directory}",
        "file": f"file:{directory}",
        "tcp": f"tcp://127.0.0.1:{free_port()}#{frames.KEY}",
    }[kind]


def check(worlds: list[World]) -> None:
    x = [np.full([3], world.rank, "f4") for world in worlds]
    for y in on_ranks(worlds, lambda world: run(world, ALL_REDUCE, *x)):
        np.testing.assert_array_equal(y, sum(x))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_store_serves_one_world_after_another(kind: str, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path)
    for _ in range(3):
        worlds = join(store, [3, 3, 3])
        check(worlds)
        close(worlds)
    assert list(tmp_path.iterdir()) == []


def test_a_file_left_by_a_world_that_died(tmp_path: Path) -> None:
    (tmp_path / "onnxpar-hub").write_text(f"123 {free_port()} 127.0.0.1\n")
    worlds = join(f"file:{tmp_path}", [2, 2])
    check(worlds)
    close(worlds)


@pytest.mark.slow
def test_a_file_that_leads_to_something_else(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tmp_path / "onnxpar-hub").write_text(f"123 {silent.getsockname()[1]} 127.0.0.1\n")
        with ThreadPoolExecutor(2) as pool:
            second = pool.submit(join, f"file:{tmp_path}", [2, 2], 5, [1])
            time.sleep(0.2)
            first = pool.submit(join, f"file:{tmp_path}", [2, 2], 5, [0])
            worlds = [*first.result(), *second.result()]
    check(worlds)
    close(worlds)


def test_a_file_left_by_a_world_that_lives(tmp_path: Path) -> None:
    """Its hub refuses rank 1, which looks again, and goes on waiting for its own ranks."""
    with Hub() as hub, ThreadPoolExecutor(1) as pool:
        port = port_of(hub.store)
        (tmp_path / "onnxpar-hub").write_text(f"123 {port} 127.0.0.1\n")
        second = pool.submit(join, f"file:{tmp_path}", [2, 2], 5, [1])
        time.sleep(0.2)
        worlds = [*join(f"file:{tmp_path}", [2, 2], 5, [0]), *second.result()]
        others = join(hub.store, [2, 2])
        for each in (worlds, others):
            check(each)
            close(each)


def test_strangers_do_not_disturb_a_hub() -> None:
    with Hub() as hub, ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, hub.store, [2, 2], 5, [0])
        port = port_of(hub.store)
        for garbage in [b"", b"GET / HTTP/1.0\r\n\r\n", b"\x01\x00\x00\x00\x00", b"\xff" * 5000]:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(garbage)
        second = join(hub.store, [2, 2], 5, [1])
        worlds = [*first.result(), *second]
        check(worlds)
        close(worlds)


@pytest.mark.parametrize("key", ["", "x", "0" * 32, None])
def test_a_false_peer_is_refused(key: str | None) -> None:
    """All is right but the key, of which None is all but the last character."""
    with Hub() as hub, ThreadPoolExecutor(1) as pool:
        right = hub.store.split("#")[1]
        first = pool.submit(join, hub.store, [2, 2], 5, [0])
        with pytest.raises(Refused):
            connect(port_of(hub.store), right[:-1] + "x" if key is None else key)
        second = join(hub.store, [2, 2], 5, [1])
        worlds = [*first.result(), *second]
        check(worlds)
        close(worlds)


def test_a_world_has_a_key_of_its_own(tmp_path: Path) -> None:
    """Rank 0 leaves it in the folder, for its user alone."""
    keys = set()
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(join, f"file:{tmp_path}", [2, 2], 5, [0])
            while not (tmp_path / "onnxpar-hub").exists():
                time.sleep(0.01)
            assert (tmp_path / "onnxpar-hub").stat().st_mode & 0o777 == 0o600
            keys.add((tmp_path / "onnxpar-hub").read_text().split()[0])
            second = join(f"file:{tmp_path}", [2, 2], 5, [1])
            close([*second, *first.result()])
    assert len(keys) == 2
    assert all(len(key) == 32 for key in keys)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_a_folder_that_another_user_writes_to(tmp_path: Path) -> None:
    (tmp_path / "onnxpar-hub").write_text("123 5 127.0.0.1\n")
    os.chown(tmp_path / "onnxpar-hub", 1234, -1)
    with pytest.raises(OnnxparError, match="onnxpar-hub belongs to user 1234; use a folder of"):
        World.create("another", 1, 2, f"file:{tmp_path}", timeout=1)


SECRET = "0123456789abcdef"


def test_an_address_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too short to be one, as torchrun's port, does not count."""
    message = "needs a key: set ONNXPAR_KEY to the same secret on all ranks"
    for host in ("192.0.2.1", "0.0.0.0", "[::]", "127.0.0.1"):
        for end in ("", "#29500"):
            with pytest.raises(OnnxparError, match="^store tcp://.*" + message):
                World.create("far", 1, 2, f"tcp://{host}:5{end}".replace("[::]", "::"), timeout=0.1)
    monkeypatch.setenv("ONNXPAR_KEY", SECRET)
    with pytest.raises(OnnxparError, match="rank 0 has not joined the world"):
        World.create("far", 1, 2, "tcp://192.0.2.1:5", timeout=0.1)
    monkeypatch.setenv("ONNXPAR_KEY", "short")
    with pytest.raises(OnnxparError, match="ONNXPAR_KEY has 5 characters, but a key has 16 to 512"):
        World.create("far", 1, 2, "tcp://127.0.0.1:5", timeout=0.1)


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts on loopback too, and beside a store's own mark."""
    store = f"tcp://127.0.0.1:{free_port()}#7"
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("ONNXPAR_KEY", SECRET)
        first = pool.submit(join, store, [2, 2], 5, [0])
        while not frames.sockets(port_of(store), hub_side=True):
            time.sleep(0.01)
        monkeypatch.setenv("ONNXPAR_KEY", SECRET[::-1])
        [error] = join(store, [2, 2], 0.3, [1])
        assert "has another key (ONNXPAR_KEY)" in error
        assert SECRET[::-1] not in error
        monkeypatch.setenv("ONNXPAR_KEY", SECRET)
        second = join(store, [2, 2], 5, [1])
        worlds = [*first.result(), *second]
        check(worlds)
        close(worlds)


def test_a_launcher_serves_the_hub() -> None:
    with Hub() as hub:
        worlds = join(hub.store, [2, 2])
        check(worlds)
        close(worlds)


def test_a_launcher_that_ends_its_hub_leaves_the_ranks_alone() -> None:
    hub = Hub()
    worlds = join(hub.store, [2, 2])
    hub.close()
    check(worlds)
    close(worlds)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_joins(kind: str, missing: int, tmp_path: Path) -> None:
    present = [rank for rank in range(3) if rank != missing]
    begun = time.monotonic()
    errors = join(store_of(kind, tmp_path), [3, 3, 3], timeout=0.5, ranks=present)
    assert time.monotonic() - begun < 3
    for error in errors:
        assert f"rank {missing} has not joined the world" in error


def test_the_least_patient_rank_learns_who_is_missing() -> None:
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(join, "hash:patience", [3, 3, 3], 5, [0])
        begun = time.monotonic()
        [error] = join("hash:patience", [3, 3, 3], timeout=0.5, ranks=[1])
        assert "rank 2 has not joined the world" in error
        assert time.monotonic() - begun < 4
        assert "rank 2 has not joined the world" in patient.result()[0]


@pytest.mark.slow
def test_ranks_that_expect_different_worlds() -> None:
    errors = join("hash:sizes", [2, 3], timeout=1)
    assert re.search(
        "expects a world of (2 ranks, but other ranks expect 3|3 ranks, but other ranks expect 2)",
        str(errors),
    )


@pytest.mark.slow
def test_two_ranks_of_one_number() -> None:
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(join, "hash:twice", [3, 3, 3], 8, [0, 1])
        time.sleep(1)
        [error] = join("hash:twice", [3, 3, 3], timeout=5, ranks=[1])
        assert "the world already has rank 1" in error
        rest.result()


@pytest.mark.slow
def test_what_the_hub_refused_is_said_however_late() -> None:
    """The hub's refusal is the error, also where the last attempt to join ended within the last
    millisecond before the timeout."""
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(join, "hash:late", [3, 3, 3], 9, [0, 1])
        time.sleep(1)
        for attempt in range(80):
            [error] = join("hash:late", [3, 3, 3], timeout=0.03 + 0.001 * (attempt % 17), ranks=[1])
            assert "not a hub of onnxpar" not in error
        rest.result()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "rank, size, store, reason",
    [
        (2, 2, "hash:x", "rank 2 is not in a world of 2 ranks"),
        (0, 2, "carrier:pigeon", "must be hash:NAME, file:/dir or tcp://host:port"),
        (0, 2, "tcp://localhost", "must be tcp://host:port"),
        (0, 2, "file:relative", "must name an absolute path"),
        (0, 2, "hash:x@0.0.0.0", "is not an address that other ranks can reach"),
        (0, 2, f"tcp://no.such.host.invalid:1#{SECRET}", "waited for 1 s .*cannot resolve"),
        (1, 2, f"tcp://no.such.host.invalid:1#{SECRET}", "waited for 1 s .*cannot resolve"),
    ],
)
def test_wrong_arguments(rank: int, size: int, store: str, reason: str) -> None:
    store, _, address = store.partition("@")
    with pytest.raises(OnnxparError, match=reason):
        World.create("wrong", rank, size, store, address or "127.0.0.1", timeout=1)


def test_a_world_of_one_rank_needs_no_store() -> None:
    with World.create("one", 0, 1, "") as world:
        [y] = on_ranks([world], lambda world: run(world, ALL_REDUCE, np.ones([2], "f4")))
        np.testing.assert_array_equal(y, np.ones([2], "f4"))


def test_ranks_on_different_addresses() -> None:
    """Hosts, if they were real ones; all of 127.0.0.0/8 is this host."""
    store = store_of("tcp", Path())

    def each(rank: int) -> World:
        return World.create(f"address/{rank}", rank, 3, store, f"127.0.0.{rank + 1}", timeout=5)

    with ThreadPoolExecutor(3) as pool:
        worlds = list(pool.map(each, range(3)))
    check(worlds)
    close(worlds)


def test_an_id_is_unique() -> None:
    with (
        World.create("same", 0, 1, ""),
        pytest.raises(OnnxparError, match="this process already has a world 'same'"),
    ):
        World.create("same", 0, 1, "")


def test_abort_reaches_every_rank_and_every_later_collective(fresh_worlds: Worlds) -> None:
    worlds = fresh_worlds(3)

    def each(world: World) -> None:
        if world.rank == 2:
            time.sleep(0.1)
            world.abort("rank 2 failed: the dog ate my tensor")
        run(world, ALL_REDUCE, *[np.ones([2], "f4")] * 3)

    for _ in range(2):
        begun = time.monotonic()
        for message in errors_on_ranks(worlds, each):
            assert "AllReduce 'node' (tag 1): rank 2 failed: the dog ate my tensor" in message
        assert {w.failure() for w in worlds} == {"rank 2 failed: the dog ate my tensor"}
        assert time.monotonic() - begun < 10


def test_a_world_is_left_during_a_collective(fresh_worlds: Worlds) -> None:
    worlds = fresh_worlds(2)

    def each(world: World) -> None:
        if world.rank == 1:
            time.sleep(0.1)
            world.close()
        run(world, ALL_REDUCE, *[np.ones([2], "f4")] * 2)

    errors = errors_on_ranks(worlds[:1] + worlds[1:], each)
    assert "rank 1" in errors[0]
    assert "left the world before AllReduce 'node' (tag 1)" in errors[0]


def test_closing_a_world_interrupts_its_collective(fresh_worlds: Worlds) -> None:
    worlds = fresh_worlds(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run, worlds[0], ALL_REDUCE, np.ones([2], "f4"))
        time.sleep(0.1)
        worlds[0].close()
        with pytest.raises(Exception, match="this rank has left the world"):
            waiting.result(timeout=5)


def test_a_session_that_outlives_its_world() -> None:
    worlds = thread_worlds(2)
    sessions = on_ranks(worlds, lambda world: session(world, ALL_REDUCE))
    close(worlds)
    for each in sessions:
        with pytest.raises(Exception, match="this rank has left the world"):
            each.run(["Y"], {"X": np.ones([2], "f4"), "t": TOKEN})


def test_sessions_come_and_go_in_one_world(worlds_of: Worlds) -> None:
    for _ in range(20):
        check(worlds_of(2))


def test_a_session_without_a_world() -> None:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    options.log_severity_level = 4
    with pytest.raises(Exception, match="AllReduce 'node': this process is not a rank"):
        ort.InferenceSession(ALL_REDUCE, options)


def test_a_world_that_does_not_exist() -> None:
    world = World("nowhere", 0, 1)
    with pytest.raises(Exception, match="'nowhere' names no world of this process"):
        session_options(world)


PROGRAM = """
import sys, numpy as np, onnxruntime as ort
options = ort.SessionOptions()
options.register_custom_ops_library(sys.argv[1])
session = ort.InferenceSession(sys.argv[2], options)
[y] = session.run(["Y"], {"X": np.ones([3], "f4"), "t": np.zeros([0], bool)})
print(y.tolist())
"""


@pytest.mark.slow
def test_a_program_that_finds_its_world_in_the_environment(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(ALL_REDUCE)
    environment = os.environ | {
        "ONNXPAR_WORLD_SIZE": "2",
        "ONNXPAR_STORE": f"file:{tmp_path}/store",
        "ONNXPAR_TIMEOUT": "20",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(library_path()), str(model)],
            env=environment | {"ONNXPAR_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=40)[0].strip() for rank in ranks] == ["[2.0, 2.0, 2.0]"] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
def test_mpirun_needs_no_environment_of_ours(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(ALL_REDUCE)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    arguments = ["-c", PROGRAM, str(library_path()), str(model)]
    output = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    # mpirun may put what ranks print, and the ends of these lines, in any order
    assert output.stdout.replace("\n", "") == "[2.0, 2.0, 2.0]" * 2, output.stderr


def test_an_interrupted_run_and_the_next() -> None:
    """It ends on all ranks with the first message; all get the same from renew, and go on."""
    worlds = thread_worlds(3, timeout=20)
    sessions = [session(world, ALL_REDUCE) for world in worlds]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            waiting = [pool.submit(total, sessions[rank]) for rank in (0, 2)]
            worlds[1].interrupt("rank 1 failed: no such row")
            for each in waiting:
                assert "rank 1 failed: no such row" in str(each.exception())
            assert "no such row" in str(pool.submit(total, sessions[1]).exception())
            assert set(pool.map(World.renew, worlds)) == {"rank 1 failed: no such row"}
            assert set(pool.map(total, sessions)) == {3.0}
        for world in worlds:
            world.close()


def test_a_rank_that_leaves_before_the_interrupt_is_told() -> None:
    """Ranks have a connection each: what another one says first may be heard last."""
    worlds = thread_worlds(3, timeout=20)
    with ThreadPoolExecutor(3) as pool:
        left = [pool.submit(worlds[rank].renew) for rank in (0, 2)]
        time.sleep(0.3)
        worlds[1].interrupt("rank 1 failed")
        assert [worlds[1].renew(), *(each.result(10) for each in left)] == ["rank 1 failed"] * 3
        assert set(pool.map(total, [session(world, ALL_REDUCE) for world in worlds])) == {3.0}
    for world in worlds:
        world.close()


@pytest.mark.matrix
@pytest.mark.parametrize("store", ["hash", "file"])
def test_the_end_of_a_world_leaves_nothing(store: str, tmp_path: Path) -> None:
    """Neither the thread nor the descriptors of the hub that rank 0 serves."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def use(number: int) -> None:
        name = f"hash:ends-{number}" if store == "hash" else f"file:{tmp_path / str(number)}"
        worlds = join(name, [2, 2])
        assert on_ranks(worlds, lambda world: total(session(world, ALL_REDUCE))) == [2, 2]
        close(worlds)

    use(0)
    before = held()
    for number in range(1, 6):
        use(number)
    ended = wait_until(lambda: all(n <= old for n, old in zip(held(), before, strict=True)))
    assert ended, (before, held())


@pytest.mark.slow
def test_a_rank_that_ends_when_it_knows_the_reason() -> None:
    """The other may still be connecting to it: it reports the same reason, and its next call says
    what is wrong then."""

    def renew(world: World, ends: bool) -> str:
        reason = world.renew()
        if ends:
            world.close()
        return reason

    with ThreadPoolExecutor(2) as pool:
        for number in range(100):
            worlds = thread_worlds(2, timeout=20)
            worlds[1].interrupt("rank 1 failed: no such row")
            ends = [rank == number % 2 for rank in range(2)]
            assert set(pool.map(renew, worlds, ends)) == {"rank 1 failed: no such row"}
            left = worlds[ends.index(False)]
            with pytest.raises(Exception, match=r"rank \d|left|cannot connect"):
                total(session(left, ALL_REDUCE))
            left.close()


@pytest.mark.slow
def test_a_rank_that_does_not_leave_an_interrupted_run() -> None:
    worlds = thread_worlds(3, timeout=1)
    sessions = [session(world, ALL_REDUCE) for world in worlds]
    worlds[0].interrupt("rank 0 failed")
    with ThreadPoolExecutor(2) as pool:
        for found in [pool.submit(world.renew) for world in worlds[:2]]:
            assert re.search(r"rank 2 \(pid \d+\) has not left the run", str(found.exception()))
    with pytest.raises(OnnxparError, match="has not left the run"):
        worlds[2].renew()
    with pytest.raises(Exception, match="has not left the run"):
        total(sessions[0])
    for world in worlds:
        world.close()


def total(rank: ort.InferenceSession) -> float:
    """The sum of ones over the ranks."""
    (result,) = rank.run(["Y"], {"X": np.ones(1, np.float32), "t": TOKEN})
    return float(result[0])
