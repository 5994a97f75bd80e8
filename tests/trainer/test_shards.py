"""Training data in shards: folders of .npz and .npy files, and row groups of Parquet files."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.steps import MLP, ThreadTrainer, same, shard, states, write_step

from onnxpar.base.errors import InputError
from onnxpar.runtime.session.bundle import NodeArg
from onnxpar.trainer.checkpoint import Checkpoint
from onnxpar.trainer.data import Data, Rest
from onnxpar.trainer.loop import Run, records

Arrays = dict[str, np.ndarray[Any, Any]]
PORTS = [
    NodeArg("x", "tensor(float)", [8, 6]),
    NodeArg("labels", "tensor(int64)", [8]),
    NodeArg("mask", "tensor(float)", [3]),
]
DIMS = {"x": 0, "labels": 0}
REST = Rest("labels", None)
CUTS = [0, 5, 6, 20, 29]


def arrays(count: int = 29) -> Arrays:
    draw = np.random.default_rng(2)
    x = draw.standard_normal((count, 6)).astype(np.float32)
    x[:, 0] = np.arange(count)
    return {"x": x, "labels": draw.integers(0, 5, count), "mask": np.ones(3, np.float32)}


def parts(given: Arrays) -> Iterator[Arrays]:
    """Parts of 5, 1, 14 and 9 samples."""
    for start, end in pairwise(CUTS):
        yield {n: a if n == "mask" else a[start:end] for n, a in given.items()}


def in_npz(folder: Path, given: Arrays) -> Path:
    for i, part in enumerate(parts(given)):
        np.savez(folder / f"{i}.npz", **part)
    return folder


def in_npz_compressed(folder: Path, given: Arrays) -> Path:
    for i, part in enumerate(parts(given)):
        np.savez_compressed(folder / f"{i}.npz", **part, more=np.zeros(3))
    return folder


def in_npy(folder: Path, given: Arrays) -> Path:
    for name, array in given.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def in_npy_parts(folder: Path, given: Arrays) -> Path:
    for i, part in enumerate(parts(given)):
        for name in part.keys() & DIMS:
            (folder / name).mkdir(exist_ok=True)
            np.save(folder / name / f"{i}.npy", part[name])
    if "mask" in given:
        np.save(folder / "mask.npy", given["mask"])
    return folder


def in_parquet(folder: Path, given: Arrays) -> Path:
    """Row groups of 5, 1 and 14 samples in one file, and 9 in another."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables = []
    for part in parts(given):
        count = len(part["labels"])
        rows = {n: list(a) if n in DIMS else [a] * count for n, a in part.items()}
        tables.append(pa.table(rows))
    with pq.ParquetWriter(folder / "0.parquet", tables[0].schema) as writer:
        for table in tables[:-1]:
            writer.write_table(table)
    pq.write_table(tables[-1], folder / "1.parquet")
    return folder


def in_arrow_lists(folder: Path, given: Arrays) -> Path:
    """In one file of lists of a fixed size, and of other types of numbers."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    count = len(given["labels"])
    x = pa.FixedSizeListArray.from_arrays(given["x"].astype(np.float64).reshape(-1), 6)
    columns = {"labels": given["labels"].astype(np.int8), "x": x}
    if "mask" in given:
        columns["mask"] = [list(given["mask"])] * count
    pq.write_table(pa.table(columns), folder / "one.parquet", row_group_size=7)
    return folder / "one.parquet"


KINDS = [in_npz, in_npz_compressed, in_npy, in_npy_parts, in_parquet, in_arrow_lists]
every_kind = pytest.mark.parametrize("write", KINDS)
Write = Callable[[Path, Arrays], Path]


def order(data: Data, epoch: int, seed: int | None, first: int = 0) -> list[int]:
    found = []
    for batch in data.epoch(epoch, seed, first):
        found += [int(x) for x, label in zip(batch["x"][:, 0], batch["labels"], strict=True)][
            : int((batch["labels"] != -100).sum())
        ]
    return found


@every_kind
@pytest.mark.parametrize("rest", [REST, None])
def test_the_batches_of_one_file(write: Write, rest: Rest | None, tmp_path: Path) -> None:
    wanted = Data.of(arrays(), PORTS, DIMS, rest=rest)
    found = Data.of(write(tmp_path, arrays()), PORTS, DIMS, rest)
    assert (found.batch, found.count, found.batches) == (8, 29, 3 if rest is None else 4)
    assert found.left_out() == wanted.left_out()
    for first in (0, 3, 8, 27, 29):
        for a, b in zip(found.epoch(0, None, first), wanted.epoch(0, None, first), strict=True):
            same(a, b)
            assert {n: x.dtype for n, x in a.items()} == {n: x.dtype for n, x in b.items()}


@every_kind
def test_each_epoch_has_each_sample_once(write: Write, tmp_path: Path) -> None:
    data = Data.of(write(tmp_path, arrays()), PORTS, DIMS, REST)
    orders = [order(data, epoch, seed) for epoch in (0, 1) for seed in (0, 7)]
    assert len({tuple(each) for each in orders}) == 4
    assert all(sorted(each) == list(range(29)) for each in orders)
    labels = arrays()["labels"]
    for batch in data.epoch(0, 0):
        counts = batch["labels"] != -100
        np.testing.assert_array_equal(
            batch["labels"][counts], labels[batch["x"][counts, 0].astype(int)]
        )
    for first in range(30):  # as a run that goes on takes them
        assert order(data, 1, 7, first) == orders[3][first:]


def test_an_epoch_reads_one_shard_after_the_other(tmp_path: Path) -> None:
    data = Data.of(in_npz(tmp_path, arrays()), PORTS, DIMS, REST)
    shards = np.repeat(np.arange(4), np.diff(CUTS))
    orders = set()
    for epoch in range(20):
        taken = shards[order(data, epoch, 3)]
        runs = [int(i) for i in taken[np.flatnonzero(np.diff(taken, prepend=-1))]]
        assert sorted(runs) == [0, 1, 2, 3]
        orders.add(tuple(runs))
    assert len(orders) > 10


def test_what_is_in_memory_has_numpys_order() -> None:
    data = Data.of(arrays(), PORTS, DIMS, rest=REST)
    for seed, epoch in ((0, 0), (5, 2)):
        wanted = np.random.default_rng([seed, epoch]).permutation(29)
        assert order(data, epoch, seed) == [int(i) for i in wanted]


@every_kind
def test_the_digest_is_that_of_what_is_in_the_files(write: Write, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    place = write(tmp_path / "one", arrays())
    digest = Data.of(place, PORTS, DIMS).digest
    assert len(digest) == 16
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    moved = tmp_path / "two" if place.is_dir() else tmp_path / "two" / place.name
    assert Data.of(moved, PORTS, DIMS).digest == digest
    assert Data.of(moved, PORTS, DIMS, pad={"x": 1}).digest != digest
    for name in DIMS:
        changed = arrays()
        changed[name].flat[90 % changed[name].size] += 1
        assert Data.of(write(tmp_path / "one", changed), PORTS, DIMS).digest != digest


@pytest.mark.parametrize("block", [64, 1 << 16])
def test_the_digest_of_large_files(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads some places of them: among these, the beginning and the end."""
    monkeypatch.setattr("onnxpar.trainer.sources._DIGESTED", 100)
    monkeypatch.setattr("onnxpar.trainer.sources._BLOCK", block)
    digests = {Data.of(in_npy(tmp_path, arrays()), PORTS, DIMS).digest}
    for row in (0, 28):
        changed = arrays()
        changed["x"][row, 5] += 1
        digests.add(Data.of(in_npy(tmp_path, changed), PORTS, DIMS).digest)
    digests.add(Data.of(in_npy(tmp_path, arrays(28)), PORTS, DIMS).digest)
    assert len(digests) == 4


def peak(what: Callable[[], None]) -> int:
    """Most bytes that this process had at a time beyond those it had before."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what it has now
    except OSError:
        pytest.skip("this system does not let a process forget its peak")
    before = status("VmRSS")
    what()
    return status("VmHWM") - before


WIDE = [NodeArg("x", "tensor(float)", [8, 10000]), NodeArg("labels", "tensor(int64)", [8])]


def write_wide(write: Write, folder: Path, count: int, patch: pytest.MonkeyPatch) -> None:
    """Writes samples of 40 kB, in ten shards."""
    patch.setattr(f"{__name__}.CUTS", list(range(0, count + 1, count // 10)))
    x = np.arange(count, dtype=np.float32)[:, None] + np.zeros((1, 10000), np.float32)
    write(folder, {"x": x, "labels": np.arange(count)})


def check_wide(folder: Path, count: int, each: Callable[[], None] = lambda: None) -> None:
    """Reads an epoch; calls `each` with each batch."""
    total = 0.0
    for batch in Data.of(folder, WIDE, DIMS).epoch(0, 1):
        np.testing.assert_array_equal(batch["x"][:, -1], batch["labels"])
        total += float(batch["x"][:, 9].sum())
        each()
    assert total == (count - 1) * count / 2


@pytest.mark.parametrize("write", [in_npz, in_npy])
def test_memory_is_bounded(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """160 MB, of which a process has a shard of 16 MB at a time, and what reads it."""
    write_wide(write, tmp_path, 4000, monkeypatch)
    assert peak(lambda: check_wide(tmp_path, 4000)) < 40e6


def test_pyarrow_has_a_row_group_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 MB; what is free in its pool does not tell."""
    pa = pytest.importorskip("pyarrow")
    write_wide(in_parquet, tmp_path, 1000, monkeypatch)
    gc.collect()
    before, held = pa.total_allocated_bytes(), []
    check_wide(tmp_path, 1000, lambda: held.append(pa.total_allocated_bytes() - before))
    assert min(held) >= 4e6 and max(held) < 7e6


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-70])


def replace(file: Path, old: bytes, new: bytes) -> None:
    file.write_bytes(file.read_bytes().replace(old, new))


def parquet_of(folder: Path, **columns: Any) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {"x": [[0.0] * 6] * 9, "labels": [1] * 9, "mask": [[1.0] * 3] * 9, **columns}
    rows = {name: rows[name] for name in rows if rows[name] is not None}
    pq.write_table(pa.table(rows), folder / "a.parquet")


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda f: None, "files of one kind: .npz, .parquet, or NAME.npy .* has none"),
    "mixed": (
        lambda f: (in_npz(f, arrays()), in_npy(f, arrays())),
        r"one kind: .* \(x, labels, mask\); this one has .npz and .npy",
    ),
    "npz without": (
        lambda f: (in_npz(f, arrays()), np.savez(f / "2.npz", x=arrays()["x"])),
        r"2\.npz has no array for the input 'labels'; its arrays: x",
    ),
    "npz shape": (
        lambda f: (
            in_npz(f, arrays()),
            np.savez(f / "2.npz", **arrays() | {"x": np.ones((29, 7))}),
        ),
        r"2\.npz: the array 'x' has the shape \[29, 7\]; the step needs \[samples, 6\]$",
    ),
    "npz counts": (
        lambda f: (in_npz(f, arrays()), np.savez(f / "2.npz", **arrays() | {"x": np.ones((9, 6))})),
        r"2\.npz: the arrays must have equal numbers of samples, but have 9 of 'x', 29 of",
    ),
    "npz cut": (
        lambda f: (in_npz(f, arrays()), cut(f / "1.npz")),
        r"1\.npz is not a \.npz file: .*; write it with numpy\.savez",
    ),
    "npy missing": (
        lambda f: (in_npy(f, arrays()), (f / "labels.npy").unlink()),
        r"has no array for the input 'labels'; give .*/labels\.npy, or a folder labels of",
    ),
    "npy of all": (
        lambda f: (in_npy(f, arrays()), (f / "mask.npy").unlink(), (f / "mask").mkdir()),
        r"has no array for the input 'mask'; give .*/mask\.npy$",
    ),
    "npy cut": (
        lambda f: (in_npy(f, arrays()), cut(f / "labels.npy")),
        r"labels\.npy cannot be read: .*; write it with numpy\.save",
    ),
    "npy objects": (
        lambda f: (in_npy(f, arrays()), np.save(f / "x.npy", np.array([{}]), allow_pickle=True)),
        r"x\.npy cannot be read: it holds Python objects; convert it",
    ),
    "npy names": (
        lambda f: (in_npy_parts(f, arrays()), (f / "x" / "3.npy").unlink()),
        r"labels/3\.npy has no counterpart for the input 'x'; give files of the same names",
    ),
    "npy counts": (
        lambda f: (in_npy_parts(f, arrays()), np.save(f / "x" / "1.npy", np.ones((2, 6)))),
        r"x/1\.npy: the arrays must have equal numbers of samples, but have 2 of 'x', 1 of",
    ),
    "few": (
        lambda f: np.savez(f / "a.npz", **{n: a[:3] for n, a in arrays().items()}),
        "has 3 samples, but a batch has 8; add samples, or write a step",
    ),
    "parquet without": (
        lambda f: parquet_of(f, labels=None),
        r"a\.parquet has no array for the input 'labels'; its arrays: mask, x",
    ),
    "parquet type": (
        lambda f: parquet_of(f, labels=["cat"] * 9),
        r"a\.parquet: the column 'labels' has the type object; the step needs int64",
    ),
    "parquet fractions": (
        lambda f: parquet_of(f, labels=[1.5] * 9),
        r"a\.parquet: the column 'labels' has numbers that int64 cannot hold",
    ),
    "parquet depth": (
        lambda f: parquet_of(f, x=[0.5] * 9),
        r"a\.parquet: the column 'x' has the type double; the step needs lists of numbers",
    ),
    "parquet short": (
        lambda f: parquet_of(f, x=[[0.5] * 6] * 8 + [[0.5] * 5]),
        r"column 'x' has a list of 5; the step needs 6; fill shorter ones with --pad x=VALUE",
    ),
    "parquet long": (
        lambda f: parquet_of(f, x=[[0.5] * 6] * 8 + [[0.5] * 7]),
        r"column 'x' has a list of 7; the step needs 6$",
    ),
    "parquet null": (
        lambda f: parquet_of(f, labels=[1] * 7 + [None] * 2),
        r"column 'labels' lacks 2 values; leave such rows out",
    ),
    "parquet inner null": (
        lambda f: parquet_of(f, x=[[0.5] * 5 + [None]] * 9),
        r"column 'x' lacks 9 values; leave such rows out",
    ),
    "parquet names": (
        lambda f: (parquet_of(f), replace(f / "a.parquet", b"labels", b"lab\x80ls")),
        r"a\.parquet cannot be read: 'utf-8' codec can't decode byte 0x80 in position 3",
    ),
    "parquet cut": (
        lambda f: (parquet_of(f), cut(f / "a.parquet")),
        r"a\.parquet cannot be read: ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_files(fault: str, tmp_path: Path) -> None:
    write, message = FAULTS[fault]
    write(tmp_path)
    with pytest.raises(InputError, match=message):
        for _ in Data.of(tmp_path, PORTS, DIMS).epoch(0, None):
            pass


def damaged(whole: bytes, draw: np.random.Generator) -> bytes:
    """A file that was cut, or of which some bytes are others: any, or those of its ends."""
    if not draw.integers(4):
        return whole[: draw.integers(len(whole))]
    most = min(len(whole), int(draw.choice([120, 1 << 30])))
    found = bytearray(whole)
    for _ in range(draw.integers(1, 4)):
        found[draw.choice([1, -1]) * draw.integers(1, most)] = draw.integers(256)
    return bytes(found)


@every_kind
def test_files_that_are_damaged(write: Write, tmp_path: Path) -> None:
    """Are refused, or are read as other numbers."""
    place = write(tmp_path, arrays())
    files = {file: file.read_bytes() for file in sorted(tmp_path.rglob("*")) if file.is_file()}
    draw = np.random.default_rng(0)
    for _ in range(40):
        file, whole = list(files.items())[draw.integers(len(files))]
        file.write_bytes(damaged(whole, draw))
        with suppress(InputError):
            data = Data.of(place, PORTS, DIMS, REST)
            for batch in data.epoch(0, None):
                assert batch["x"].shape == (8, 6) and batch["labels"].shape == (8,)
        file.write_bytes(whole)


@pytest.mark.parametrize("write", [in_npz, in_npy, in_npy_parts, in_parquet])
def test_files_that_change_during_a_run(write: Write, tmp_path: Path) -> None:
    """They are not read as another number of samples."""
    data = Data.of(write(tmp_path, arrays()), PORTS, DIMS)
    write(tmp_path, {n: a if n == "mask" else a[:24] for n, a in arrays().items()})
    with pytest.raises(InputError, match="has changed since the run began; begin the run again"):
        list(data.epoch(0, None))


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_text("")
    with pytest.raises(InputError, match=r"a\.parquet needs pyarrow; .* pip install 'onnxpar\[par"):
        Data.of(tmp_path, PORTS, DIMS)


@pytest.fixture(scope="module")
def par(tmp_path_factory: Any) -> Path:
    return shard(write_step(MLP, tmp_path_factory.mktemp("m"), optimizer="adam"), "zero1 2")[0]


def train(par: Path, data: Any, run: Run, most: int | None = None) -> tuple[list[float], Arrays]:
    """The losses and the states of a run, or of its first steps."""
    with ThreadTrainer(par) as trainer:
        losses = []
        for record in records(trainer, trainer.batches_of(data), run):
            losses.append(record.values["loss"])
            if record.total == most:
                break
        return losses, states(trainer)


@pytest.mark.parametrize("write", [in_npz, in_npy, in_parquet])
def test_a_run_over_shards(par: Path, write: Write, tmp_path: Path) -> None:
    """Has the bits of one over arrays, and goes on in the middle of a shard."""
    given = {n: a for n, a in arrays().items() if n != "mask"}
    straight = Run(2, 0.05, shuffle=False)
    found = train(par, write(tmp_path, given), straight)
    wanted = train(par, given, straight)
    assert found[0] == wanted[0] and len(found[0]) == 8
    same(found[1], wanted[1])
    whole, left = train(par, tmp_path, Run(2, 0.05))
    saving = {"checkpoint": tmp_path / "c", "every": 1}
    losses, _ = train(par, tmp_path, Run(2, 0.05, **saving), most=7)
    assert losses == whole[:7]
    assert Checkpoint.load(tmp_path / "c").progress.samples == 16
    rest, states_then = train(par, tmp_path, Run(2, 0.05, **saving, resume=True))
    assert rest == whole[6:]
    same(states_then, left)


def test_a_run_does_not_go_on_with_other_shards(par: Path, tmp_path: Path) -> None:
    given = {n: a for n, a in arrays().items() if n != "mask"}
    in_npz(tmp_path, given)
    train(par, tmp_path, Run(1, 0.05, checkpoint=tmp_path / "c"))
    given["x"][7] += 1
    in_npz(tmp_path, given)
    with pytest.raises(InputError, match=r"data of digest [0-9a-f]{16}, now [0-9a-f]{16}; give"):
        train(par, tmp_path, Run(2, 0.05, checkpoint=tmp_path / "c", resume=True))
