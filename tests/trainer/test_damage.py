"""Checkpoints that are not what was written are never loaded. Where none was named, others take
their place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.steps import MLP, ThreadTrainer, same, shard, states, write_step

from onnxpar.base import digests
from onnxpar.base.errors import ModelError
from onnxpar.cli.command_line import main
from onnxpar.trainer.checkpoint import FORMAT, Checkpoint, Progress
from onnxpar.trainer.data import Data
from onnxpar.trainer.loop import Run, records
from onnxpar.trainer.trainer import Trainer

FLIPS = 300
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a step over two ranks, and checkpoints of steps 1 to 5 of it."""
    folder = tmp_path_factory.mktemp("damage")
    step = write_step(MLP, folder, optimizer="adam")
    shard(step, "zero2 2")[0].rename(folder / "step.par")
    draw = np.random.default_rng(0)
    x = draw.standard_normal((40, 6)).astype(np.float32)
    np.savez(folder / "train.npz", x=x, labels=draw.integers(0, 5, 40))
    with ThreadTrainer(folder / "step.par") as trainer:
        train(trainer, folder, Run(1, 0.02, checkpoint=folder / "c", every=1))
    return folder


def train(trainer: Trainer, made: Path, run: Run) -> None:
    list(records(trainer, Data.of(made / "train.npz", trainer.data, trainer.spec.batch), run))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Five checkpoints of its own."""
    shutil.copytree(made / "c", tmp_path / "c")
    return tmp_path / "c"


def at(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def values(found: Checkpoint) -> dict[str, Any]:
    return {slot.input: found.states.read(slot.input) for slot in found.slots}


@pytest.mark.slow
def test_no_flipped_bit_is_loaded(folder: Path) -> None:
    """In any file of a checkpoint: the error names the file and the remedy."""
    random = np.random.default_rng(0)
    saved = at(folder, 5)
    files = sorted(saved.iterdir())
    assert [f.name for f in files] == [
        "checkpoint.json",
        *(f"rank_{rank:04d}.{suffix}" for rank in range(2) for suffix in ("bin", "json")),
    ]
    Checkpoint.load(saved)
    refused = dict.fromkeys((file.name for file in files), 0)
    for number in range(FLIPS):
        file = files[number % len(files)]
        bit = int(random.integers(8 * file.stat().st_size))
        flip(file, bit)
        with pytest.raises(ModelError) as failed:
            Checkpoint.load(saved)
        text = str(failed.value)
        assert file.name in text and "\n" not in text
        assert text.endswith("restore it from a copy, or go on from another checkpoint")
        refused[file.name] += 1
        flip(file, bit)
    print(f"{sum(refused.values())} of {FLIPS} flipped bits are refused: {refused}")
    assert sum(refused.values()) == FLIPS
    Checkpoint.load(saved)


def swap(one: Path, two: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "swapped": (lambda c: swap(c / "rank_0000.bin", c / "rank_0001.bin"), r"rank_000\d\.bin"),
    "swapped lists": (lambda c: swap(c / "rank_0000.json", c / "rank_0001.json"), "rank_000"),
    "truncated": (lambda c: (c / "rank_0001.bin").write_bytes(b"x"), r"rank_0001\.bin has 1 bytes"),
    "emptied": (lambda c: (c / "rank_0000.json").write_bytes(b""), r"rank_0000\.json has 0 bytes"),
    "longer": (lambda c: (c / "rank_0001.bin").open("ab").write(b"x"), r"rank_0001\.bin has"),
    "missing": (lambda c: (c / "rank_0001.bin").unlink(), r"cannot read .*rank_0001\.bin: No such"),
    "no record": (lambda c: (c / "checkpoint.json").unlink(), r"cannot read .*checkpoint\.json"),
    "empty record": (
        lambda c: (c / "checkpoint.json").write_bytes(b""),
        r"checkpoint\.json is damaged, or not written by",
    ),
    "longer record": (
        lambda c: (c / "checkpoint.json").open("ab").write(b" "),
        r"checkpoint\.json has changed since it was written",
    ),
    "of another": (
        lambda c: shutil.copy(at(c.parent, 4) / "rank_0001.bin", c / "rank_0001.bin"),
        r"rank_0001\.bin has changed since it was written",
    ),
    "empty": (lambda c: [file.unlink() for file in c.iterdir()], r"checkpoint\.json"),
    "a file": (lambda c: (shutil.rmtree(c), c.write_text("x")), r"checkpoint\.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_where_it_is_named(damage: str, folder: Path) -> None:
    """And another takes its place where the folder is named; stderr says so in one line."""
    spoil, text = DAMAGES[damage]
    spoil(at(folder, 5))
    with pytest.raises(ModelError, match=f"{text}.*; restore it from a copy, or go on"):
        Checkpoint.load(at(folder, 5))
    assert Checkpoint.load(at(folder, 4)).progress.step == 4


@pytest.mark.matrix
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_one_is_loaded(
    damage: str, made: Path, folder: Path, capsys: Capture
) -> None:
    wanted = values(Checkpoint.load(at(folder, 4)))
    DAMAGES[damage][0](at(folder, 5))
    found = Checkpoint.load(folder)
    said = capsys.readouterr().err
    assert said.startswith("onnxpar: warning: ") and said.count("\n") == 1
    assert str(at(folder, 5)) in said and f"; {at(folder, 4)} is loaded instead" in said
    same(values(found), wanted)
    with ThreadTrainer(made / "step.par") as trainer:
        assert trainer.load(folder).path == at(folder, 4)
        same(states(trainer), wanted)


@pytest.mark.slow
@pytest.mark.processes
def test_several_are_damaged_and_then_all(made: Path, folder: Path, capsys: Capture) -> None:
    for step in (5, 4, 2):
        flip(at(folder, step) / "rank_0001.bin", 99)
    assert Checkpoint.load(folder).progress.step == 3
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(f"; {at(folder, 3)} is loaded instead" in line for line in said)
    for step in (3, 1):
        flip(at(folder, step) / "rank_0001.bin", 99)
    arguments = ["train", str(made / "step.par"), "--data", str(made / "train.npz"), "--lr", "0.1"]
    logs = ["--log-dir", str(folder.parent / "log")]
    assert main([*arguments, "--checkpoint", str(folder), "--resume", *logs]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(
        f"onnxpar: error: {folder}: all of its checkpoints (5) are damaged; in the newest, "
        f"{at(folder, 5) / 'rank_0001.bin'} has changed since it was written"
    )
    assert len(list(folder.iterdir())) == 5


def test_merge_falls_back_too(made: Path, folder: Path, capsys: Capture) -> None:
    """But not from one that is named."""
    flip(at(folder, 5) / "rank_0000.bin", 1000)
    model, out = str(made / "model.onnx"), folder.parent / "out.onnx"
    assert main(["checkpoint", "merge", str(folder), model, "-o", str(out)]) == 0
    assert f"; {at(folder, 4)} is loaded instead" in capsys.readouterr().err
    again = folder.parent / "again.onnx"
    assert main(["checkpoint", "merge", str(at(folder, 4)), model, "-o", str(again)]) == 0
    assert out.read_bytes() == again.read_bytes()
    out.unlink()
    assert main(["checkpoint", "merge", str(at(folder, 5)), model, "-o", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("onnxpar: error: ") and said.count("\n") == 1
    assert "rank_0000.bin has changed since it was written" in said and not out.exists()


def test_nothing_changes_before_all_is_compared(made: Path, folder: Path) -> None:
    """The last file has the damage; the states of the first rank stay as well."""
    flip(at(folder, 5) / "rank_0001.bin", 99)
    with ThreadTrainer(made / "step.par") as trainer:
        before = states(trainer)
        with pytest.raises(ModelError, match=r"rank_0001\.bin has changed since it was written"):
            trainer.load(at(folder, 5))
        same(states(trainer), before)


@pytest.mark.matrix
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_a_run_goes_on_past_what_is_damaged(
    keep: int, every: int, made: Path, folder: Path, capsys: Capture
) -> None:
    """It replaces what it reaches; --keep counts what is whole, and removes none of that for the
    sake of what is not."""
    for step in (5, 4, 2):
        flip(at(folder, step) / "rank_0001.bin", 99)
    with ThreadTrainer(made / "step.par") as trainer:
        data = Data.of(made / "train.npz", trainer.data, trainer.spec.batch)
        run = Run(1, 0.02, checkpoint=folder, every=every, keep=keep, resume=True)
        each = records(trainer, data, run)
        record, left = next(each, None), []
        while record is not None:
            following = next(each, None)  # its checkpoint is written before
            names = sorted(int(path.name[5:]) for path in folder.iterdir() if path.name[0] == "s")
            left.append((record.total, names))
            record = following
    assert (
        left
        == {
            (0, 1): [(4, [1, 2, 3, 4, 5]), (5, [1, 2, 3, 4, 5])],
            (1, 1): [(4, [4, 5]), (5, [5])],
            (2, 1): [(4, [3, 4, 5]), (5, [4, 5])],
            (3, 1): [(4, [1, 2, 3, 4, 5]), (5, [3, 4, 5])],
            (0, 2): [(4, [1, 2, 3, 4, 5]), (5, [1, 2, 3, 4, 5])],
            (1, 2): [(4, [4, 5]), (5, [5])],
            (2, 2): [(4, [3, 4, 5]), (5, [4, 5])],
            (3, 2): [(4, [1, 2, 3, 4, 5]), (5, [3, 4, 5])],
        }[keep, every]
    )
    same(values(Checkpoint.load(folder)), values(Checkpoint.load(at(made / "c", 5))))
    counted = "--keep does not count it" in capsys.readouterr().err
    assert counted == (keep == 3)


def test_one_without_digests_is_loaded_with_a_warning(folder: Path, capsys: Capture) -> None:
    """As an older onnxpar wrote it; one that has lost its digests is not taken for that."""
    saved = at(folder, 5)
    wanted = values(Checkpoint.load(saved))
    data = json.loads((saved / "checkpoint.json").read_text()) | {"format": 1}
    (saved / "checkpoint.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match=r"checkpoint\.json has changed since it was written"):
        Checkpoint.load(saved)
    del data["files"], data["sha256"]
    (saved / "checkpoint.json").write_text(json.dumps(data))
    same(values(Checkpoint.load(saved)), wanted)
    said = capsys.readouterr().err
    assert f"{saved} was written by an older onnxpar" in said and "it is not verified" in said


def test_one_of_a_newer_onnxpar_is_no_damage(folder: Path) -> None:
    """An older one does not take its place."""
    record = at(folder, 5) / "checkpoint.json"
    record.write_text(digests.sealed(json.loads(record.read_text()) | {"format": 4}))
    with pytest.raises(
        ModelError, match="has format 4, but this onnxpar reads format 3; update onnxpar"
    ):
        Checkpoint.load(folder)


def test_digests_are_those_of_the_files(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many blocks, too, and of damage in any of them."""
    with ThreadTrainer(made / "step.par") as trainer:
        monkeypatch.setattr(digests, "BLOCK", 100)
        trainer.save(tmp_path, Progress(1))
    saved = at(tmp_path, 1)
    data = json.loads((saved / "checkpoint.json").read_text())
    files = sorted(saved.glob("rank_*"))
    assert data["files"] == digests.digests_of(files)
    assert len(data["files"]["rank_0000.bin"]["sha256"]) > 5
    for byte in range(0, (saved / "rank_0000.bin").stat().st_size, 50):
        flip(saved / "rank_0000.bin", 8 * byte)
        with pytest.raises(ModelError, match=f"from byte {byte // 100 * 100};"):
            Checkpoint.load(saved)
        flip(saved / "rank_0000.bin", 8 * byte)


def test_the_format_says_how_long_blocks_are() -> None:
    """Checkpoints live for long: their digests must be read as they were made."""
    assert (FORMAT, digests.BLOCK) == (3, 1 << 20)


def test_one_that_is_removed_meanwhile(folder: Path) -> None:
    """As --keep of a run that goes on does: what was loaded can be read."""
    wanted = values(Checkpoint.load(at(folder, 5)))
    found = Checkpoint.load(folder)
    shutil.rmtree(at(folder, 5))
    same(values(found), wanted)


def test_steps_of_nine_digits(made: Path, tmp_path: Path) -> None:
    with ThreadTrainer(made / "step.par") as trainer:
        for step in (99_999_999, 100_000_000):
            trainer.save(tmp_path, Progress(step))
    assert Checkpoint.load(tmp_path).progress.step == 100_000_000


def test_a_link_to_a_checkpoint(made: Path, folder: Path) -> None:
    """As of one that was moved to another disk: it counts, and what it points to is not removed."""
    moved = folder.parent / "moved"
    at(folder, 5).rename(moved)
    at(folder, 5).symlink_to(moved)
    assert Checkpoint.load(folder).progress.step == 5
    with ThreadTrainer(made / "step.par") as trainer:
        trainer.load(folder)
        trainer.save(folder, Progress(6))
        trainer.keep(folder, Progress(6), 1)
        assert [path.name for path in folder.glob("*step*")] == ["step_00000006"]
    assert Checkpoint.load(moved).progress.step == 5


@pytest.mark.parametrize("size", [-1, False, 2.0, "2"])
def test_sizes_that_are_none(size: object, folder: Path) -> None:
    """In a record whose own digest is right."""
    record = at(folder, 5) / "checkpoint.json"
    data = json.loads(record.read_text())
    next(layout for layout in data["layouts"].values() if layout["dims"])["dims"][0]["size"] = size
    record.write_text(digests.sealed(data))
    with pytest.raises(ModelError, match=f"damaged.*a size is {size!r}"):
        Checkpoint.load(at(folder, 5))
