"""What carries messages between ranks: shared memory, Gloo, or both in one world."""

from __future__ import annotations

import mmap
import os
import re
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from native.media import results_over

from onnxpar.base.errors import RankError
from onnxpar.runtime.ranks.groups import thread_worlds


@pytest.fixture(scope="module", autouse=True)
def every_medium() -> None:
    """These tests set it themselves."""


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    answers = results_over(tmp_path_factory.mktemp("gloo"), "gloo", "gloo", "gloo")
    assert [shared for shared, _ in answers] == [[False] * 3] * 3
    return [digests for _, digests in answers]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("media", "pairs"),
    [
        (("auto", "auto", "auto"), [(0, 1), (0, 2), (1, 2)]),
        (("auto", "auto", "gloo"), [(0, 1)]),
        (("gloo", "auto", "auto"), [(1, 2)]),
        (("auto", "gloo", "auto"), [(0, 2)]),
    ],
)
def test_each_pair_has_its_medium_and_all_the_same_bits(
    media: tuple[str, ...],
    pairs: list[tuple[int, int]],
    over_gloo: list[object],
    tmp_path: Path,
) -> None:
    answers = results_over(tmp_path, *media)
    both = {*pairs, *((b, a) for a, b in pairs)}
    assert [shared for shared, _ in answers] == [
        [(rank, other) in both for other in range(3)] for rank in range(3)
    ]
    assert [digests for _, digests in answers] == over_gloo


def test_shared_memory_alone(tmp_path: Path) -> None:
    for said in results_over(tmp_path, "shared-memory", "gloo"):
        assert "ONNXPAR_TRANSPORT=shared-memory, but not all ranks" in said


def test_an_unknown_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPAR_TRANSPORT", "carrier-pigeon")
    with pytest.raises(RankError, match="'carrier-pigeon' must be auto, gloo or shared-memory"):
        thread_worlds(2)


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPAR_TRANSPORT", "shared-memory")


def segments() -> list[Path]:
    """The shared memory that this process holds descriptors of."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith("/memfd:onnxpar"):
                found.append(entry)
    return found


def test_no_other_process_can_write_or_resize(shared_memory: None) -> None:
    others = segments()
    worlds = thread_worlds(2)
    own = [segment for segment in segments() if segment not in others]
    assert len(own) == 2
    for segment in own:
        descriptor = os.open(segment, os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096)
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        os.close(descriptor)
    for world in worlds:
        world.close()
    assert segments() == others


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_is_named(shared_memory: None, small_files: None) -> None:
    with pytest.raises(
        RankError, match=r"cannot create \d+ bytes of shared memory: File too large"
    ):
        thread_worlds(2)


def test_strangers_are_ignored(shared_memory: None) -> None:
    """Whoever finds the name of a rank's socket still needs its key."""
    stop = threading.Event()
    met = []

    def disturb() -> None:
        while not stop.is_set():
            names = re.findall(r"@(onnxpar-\w+)", Path("/proc/net/unix").read_text())
            for name in names:
                with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
                    s.connect("\0" + name)
                    with open("/dev/null") as other:
                        socket.send_fds(s, [b"x" * (36 + 128)], [other.fileno()])
                    met.append(name)

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb)
        for _ in range(20):
            worlds = thread_worlds(3, timeout=30)
            assert worlds[0].shares_memory_with(2)
            for world in worlds:
                world.close()
        stop.set()
        disturbing.result()
    assert met
