"""Files that are hashed while they are written have the digests of what is on the disk."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from onnxpar.base import digests, write_digested
from onnxpar.base.digests import digests_of
from onnxpar.base.hashing import Hashing, Stretch
from onnxpar.base.write_digested import DigestedFile, DigestedFolder

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 bytes, so that files have many."""
    for module in (digests, write_digested):
        monkeypatch.setattr(module, "BLOCK", 64)


def fill(file: DigestedFile, source: Path, seed: int) -> None:
    """Appends pieces of all sizes: bytes, parts of another file, and gaps."""
    random = np.random.default_rng(seed)
    with file.opened():
        for _ in range(40):
            size = int(random.integers(0, 300))
            kind = random.integers(3)
            if kind == 0:
                file.append(random.bytes(size))
            elif kind == 1:
                file.append_from(source, int(random.integers(500)), size)
            else:
                file.align(int(random.integers(1, 100)))
                file.append(b"x")


@pytest.mark.parametrize("seed", range(10))
def test_digests_are_those_of_the_files(seed: int, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_bytes(RANDOM.bytes(1000))
    out.mkdir()
    folder = DigestedFolder(out)
    for number in range(3):
        fill(folder.file(f"{number}.weights"), source, 3 * seed + number)
    folder.put("graph", b"g" * 64 * seed)
    folder.copy("copied", source)
    found = folder.digests()
    assert found == digests_of(sorted(out.iterdir()))
    assert [*found] == sorted(found)
    assert (out / "copied").read_bytes() == source.read_bytes()


def test_what_is_not_written_has_the_same_digests(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(RANDOM.bytes(1000))
    found = []
    for ranks in (None, [0], [1, 2]):
        out = tmp_path / str(ranks)
        out.mkdir()
        folder = DigestedFolder(out, ranks)
        for seed, readers in enumerate(([0], [1], [0, 2], [3], None)):
            fill(folder.file(f"{seed}.weights", readers), source, seed)
        folder.put("rank_0003.onnx", b"graph", [3])
        found.append(folder.digests())
        names = {file.name for file in out.iterdir()}
        assert names == {
            f"{seed}.weights"
            for seed, readers in enumerate(([0], [1], [0, 2], [3], None))
            if ranks is None or readers is None or {*readers} & {*ranks}
        } | ({"rank_0003.onnx"} if ranks is None else set())
    assert found[0] == found[1] == found[2]
    assert found[0]["2.weights"]["ranks"] == [0, 2] and "ranks" not in found[0]["4.weights"]


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_systems_between_which_the_kernel_does_not_copy(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a disk and one in memory."""

    def refuse(*args: int) -> int:
        raise OSError(code, os.strerror(code))

    source, out = tmp_path / "source", tmp_path / "out"
    source.write_bytes(RANDOM.bytes(1000))
    out.mkdir()
    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr("onnxpar.base.copy_part.BLOCK", 300)
    folder = DigestedFolder(out)
    folder.copy("copied", source)
    assert folder.digests() == digests_of([out / "copied"])
    assert (out / "copied").read_bytes() == source.read_bytes()


def test_an_empty_file_has_a_digest(tmp_path: Path) -> None:
    folder = DigestedFolder(tmp_path)
    folder.put("empty", b"")
    nothing = hashlib.sha256().hexdigest()
    assert folder.digests() == {"empty": {"bytes": 0, "sha256": [nothing]}}
    assert (tmp_path / "empty").read_bytes() == b""


@pytest.mark.parametrize("ranks", [None, [1]])
def test_a_source_that_ends_too_early(ranks: list[int] | None, tmp_path: Path) -> None:
    """As when it is cut off meanwhile: an error, and no wrong file."""
    source = tmp_path / "source"
    source.write_bytes(b"short")
    folder = DigestedFolder(tmp_path, ranks)
    with folder.file("a", [0]).opened() as file:
        if ranks is None:
            with pytest.raises(OSError, match="a file that is copied ends 95 bytes too early"):
                file.append_from(source, 0, 100)
            return
        file.append_from(source, 0, 100)
    with pytest.raises(OSError, match=r"source ends \d+ bytes too early"):
        folder.digests()


def test_an_error_of_a_thread_is_raised(tmp_path: Path) -> None:
    hashing = Hashing()
    hashing.add([Stretch(tmp_path / "none", 0, 10)], lambda digest: None)
    with pytest.raises(FileNotFoundError):
        hashing.finish()


def test_memory_that_is_used_again_does_not_change_digests(tmp_path: Path) -> None:
    """A reader fills one buffer with block after block."""
    folder = DigestedFolder(tmp_path)
    with folder.file("a").opened() as file:
        for number in range(200):
            file.append(bytes([number]) * 50)
    assert folder.digests() == digests_of([tmp_path / "a"])
