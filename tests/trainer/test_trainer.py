"""A trainer, its runs, and the checkpoints that they leave; ranks are threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from training.models import CONV
from training.steps import (
    DOUBLE,
    MLP,
    Array,
    ThreadTrainer,
    newest,
    quiet,
    run_unsplit,
    same,
    shard,
    states,
    write_model,
    write_step,
)

from onnxpar.base.digests import sealed
from onnxpar.base.errors import InputError, ModelError, OnnxparError
from onnxpar.trainer.checkpoint import Checkpoint, Progress
from onnxpar.trainer.data import Data
from onnxpar.trainer.loop import Record, Run, records
from onnxpar.trainer.merge import merge
from onnxpar.trainer.rates import Schedule
from onnxpar.trainer.trainer import Trainer
from onnxpar.trainer.write_checkpoint import begin


def samples(count: int = 40, dtype: type = np.float32) -> dict[str, Array]:
    draw = np.random.default_rng(9)
    x = draw.standard_normal((count, 6)).astype(dtype)
    return {"x": x, "labels": draw.integers(0, 5, count)}


def data_for(trainer: Trainer, dtype: type = np.float32) -> Data:
    return Data.of(samples(dtype=dtype), trainer.data, trainer.spec.batch)


def train(par: Path, run: Run, dtype: type = np.float32) -> tuple[list[Record], dict[str, Array]]:
    with ThreadTrainer(par) as trainer:
        told = list(records(trainer, data_for(trainer, dtype), run))
        return told, states(trainer)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """5 batches of 8 an epoch."""
    return write_step(MLP, tmp_path, optimizer="adam", clip_norm=1.0)


def test_a_run_tells_of_each_step(step: Path, tmp_path: Path) -> None:
    """As one rank would take them: the same batches, the same rates."""
    par, _ = shard(step, "zero2 2")
    run = Run(2, 0.02, Schedule("cosine", 3), seed=4)
    told, left = train(par, run)
    assert [(r.epoch, r.step, r.total) for r in told] == [
        (i // 5 + 1, i % 5 + 1, i + 1) for i in range(10)
    ]
    np.testing.assert_allclose([r.rate for r in told][:4], [0.02 / 3, 0.04 / 3, 0.02, 0.02])
    with ThreadTrainer(par) as trainer:
        data = data_for(trainer)
        batches = [b for epoch in range(2) for b in data.epoch(epoch, 4)]
    alone, spec = run_unsplit(step, batches, [r.rate for r in told])
    for record, results in zip(told, alone, strict=True):
        np.testing.assert_allclose(record.values["loss"], results["loss"], rtol=1e-5)
        norm = results["gradient_norm"]
        np.testing.assert_allclose(record.values["gradient_norm"], norm, rtol=1e-4)
    for slot in spec.slots:
        np.testing.assert_allclose(left[slot.input], alone[-1][slot.output], atol=2e-4)
    assert int(left["step"]) == 10


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_the_same_run_leaves_the_same_bits(step: Path) -> None:
    par, _ = shard(step, "zero3 dp=2,tp=2")
    first, again = (train(par, Run(1, 0.02)) for _ in range(2))
    same(first[1], again[1])
    assert [r.values for r in first[0]] == [r.values for r in again[0]]
    other = train(par, Run(1, 0.02, seed=1))
    assert [r.values for r in first[0]] != [r.values for r in other[0]]
    straight = train(par, Run(1, 0.02, seed=1, shuffle=False))
    same(straight[1], train(par, Run(1, 0.02, seed=2, shuffle=False))[1])


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("layout", ["zero3 2", "tensor-parallel 3"])
def test_resuming_continues_bit_identically(layout: str, step: Path, tmp_path: Path) -> None:
    """10 steps at once, or 5, 7 and the rest: in the middle of an epoch too."""
    par, _ = shard(step, layout)
    _, at_once = train(par, Run(2, 0.02, Schedule("linear", 2)))
    folder = tmp_path / "checkpoints"
    with ThreadTrainer(par) as trainer:
        run = Run(2, 0.02, Schedule("linear", 2), checkpoint=folder, every=7)
        for record in records(trainer, data_for(trainer), run):
            if record.total == 8:
                break  # as if it were killed
    assert newest(folder) == folder / "step_00000007"
    told, left = train(par, Run(2, 0.02, Schedule("linear", 2), checkpoint=folder, resume=True))
    assert [(r.epoch, r.step, r.total) for r in told] == [(2, 3, 8), (2, 4, 9), (2, 5, 10)]
    same(left, at_once)
    assert newest(folder) == folder / "step_00000010"
    told, left = train(par, Run(2, 0.02, Schedule("linear", 2), checkpoint=folder, resume=True))
    assert told == []
    same(left, at_once)


def test_a_record_comes_before_its_checkpoint(step: Path, tmp_path: Path) -> None:
    """A run that is killed in between takes the step again, and its row is not missing."""
    par, _ = shard(step, "data-parallel 2")
    with ThreadTrainer(par) as trainer:
        run = Run(1, 0.02, checkpoint=tmp_path, every=1)
        for record in records(trainer, data_for(trainer), run):
            last = newest(tmp_path)
            assert (int(last.name[-8:]) if last else 0) == record.total - 1
    assert newest(tmp_path) == tmp_path / "step_00000005"


def test_resuming_where_there_is_nothing_starts(step: Path, tmp_path: Path) -> None:
    par, _ = shard(step, "data-parallel 2")
    told, _ = train(par, Run(1, 0.02, checkpoint=tmp_path / "none", resume=True))
    assert len(told) == 5 and newest(tmp_path / "none") == tmp_path / "none" / "step_00000005"


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("data-parallel 8", "tensor-parallel 4"),
        ("zero3 8", "zero1 3"),
        ("zero2 dp=2,tp=2", "data-parallel 1"),
        ("tensor-parallel 3", "zero3 dp=3,tp=2"),
    ],
)
def test_a_checkpoint_goes_on_on_another_mesh(before: str, after: str, tmp_path: Path) -> None:
    step = write_step(DOUBLE, tmp_path, optimizer="adamw")
    folder = tmp_path / "checkpoints"
    one, other = (shard(step, layout)[0] for layout in (before, after))
    wide = np.float64
    _, half = train(one, Run(1, 0.02, checkpoint=folder), wide)
    with ThreadTrainer(other) as trainer:
        trainer.load(Checkpoint.load(folder))
        same(states(trainer), half)
        list(records(trainer, data_for(trainer, wide), Run(1, 0.02, seed=1)))
        left = states(trainer)
    with ThreadTrainer(one) as trainer:
        trainer.load(Checkpoint.load(folder))
        list(records(trainer, data_for(trainer, wide), Run(1, 0.02, seed=1)))
        for name, value in states(trainer).items():
            np.testing.assert_allclose(left[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_folders_that_are_not_finished_do_not_count(step: Path, tmp_path: Path) -> None:
    par, _ = shard(step, "data-parallel 2")
    folder = tmp_path / "checkpoints"
    train(par, Run(1, 0.02, checkpoint=folder, every=2))
    names = ["step_00000002", "step_00000004", "step_00000005"]
    assert sorted(p.name for p in folder.iterdir()) == names
    begin(folder, Progress(step=8))
    left = begin(folder, Progress(step=9))
    assert [p.name for p in folder.glob(".*")] == [left]
    (folder / left / "rank_0000.bin").touch()
    (folder / "notes").mkdir()
    assert newest(folder) == folder / "step_00000005"
    found = [Checkpoint.load(folder / name).progress for name in names]
    assert [(p.step, p.epoch, p.samples) for p in found] == [(2, 0, 16), (4, 0, 32), (5, 1, 0)]


def test_a_checkpoint_replaces_one_of_the_same_step(step: Path, tmp_path: Path) -> None:
    par, _ = shard(step, "data-parallel 2")
    folder = tmp_path / "checkpoints"
    with ThreadTrainer(par) as trainer:
        trainer.save(folder, Progress(5))
        list(records(trainer, data_for(trainer), Run(1, 0.02)))
        trainer.save(folder, Progress(5))
        second = states(trainer)
    assert [p.name for p in folder.iterdir()] == ["step_00000005"]
    np.testing.assert_array_equal(Checkpoint.load(folder).states.read("w1"), second["w1"])


@pytest.mark.slow
def test_each_part_is_written_once(step: Path, tmp_path: Path) -> None:
    """What all ranks hold alike is the first one's to write."""
    par, _ = shard(step, "zero2 dp=2,tp=2")
    train(par, Run(1, 0.02, checkpoint=tmp_path / "c"))
    folder = newest(tmp_path / "c")
    assert folder is not None
    indices = [json.loads((folder / f"rank_{r:04d}.json").read_text()) for r in range(4)]
    assert [("step" in i, "w1" in i, "w1.exp_avg" in i) for i in indices] == [
        (True, True, True),
        (False, True, True),
        (False, False, True),
        (False, False, True),
    ]


@pytest.fixture
def saved(step: Path, tmp_path: Path) -> Path:
    """A checkpoint of `step` on two ranks."""
    par, _ = shard(step, "zero3 2")
    train(par, Run(1, 0.02, checkpoint=tmp_path / "c"))
    return tmp_path / "c" / "step_00000005"


def as_before(saved: Path) -> None:
    """Makes a checkpoint one of format 1."""
    file = saved / "checkpoint.json"
    data = json.loads(file.read_text()) | {"format": 1}
    file.write_text(json.dumps({k: v for k, v in data.items() if k not in ("files", "sha256")}))


def refused(par: Path, saved: Path, message: str) -> None:
    with ThreadTrainer(par) as trainer:
        before = states(trainer)
        with pytest.raises(ModelError, match=message):
            trainer.load(Checkpoint.load(saved))
        same(states(trainer), before)


@pytest.mark.slow
def test_checkpoints_of_other_steps(saved: Path, tmp_path: Path) -> None:
    for name, text, optimizer, message in (
        ("lamb", MLP, "lamb", None),
        ("momentum", MLP, "momentum", "has no 'w1.momentum_buffer'; it belongs to another"),
        ("wider", MLP.replace("9", "7"), "adam", r"'w1' was given float32 \[6, 9\]"),
        ("double", DOUBLE, "adam", "'w1' was given float32"),
    ):
        (tmp_path / name).mkdir()
        par, _ = shard(write_step(text, tmp_path / name, optimizer=optimizer), "data-parallel 2")
        if message is None:
            with ThreadTrainer(par) as trainer:
                trainer.load(Checkpoint.load(saved))
        else:
            refused(par, saved, message)


@pytest.mark.slow
def test_checkpoints_that_lack_something(saved: Path, step: Path) -> None:
    """Of the format before, which has no digests."""
    as_before(saved)
    par = step.with_name("zero3_2.par")
    file = saved / "rank_0001.json"
    index = json.loads(file.read_text())
    entry = index.pop("w3")
    file.write_text(json.dumps(index))
    refused(par, saved, r"rank_0001\.json: state 'w3' is missing or damaged")
    file.write_text(json.dumps({**index, "w3": {**entry, "offset": 1 << 20}}))
    refused(par, saved, r"rank_0001\.json: state 'w3' is missing or damaged")
    file.write_text("{")
    refused(par, saved, r"rank_0001\.json: state 'w\d' is missing or damaged")
    file.unlink()
    refused(par, saved, r"rank_0001\.json: state 'w\d' is missing or damaged")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": 99},
            r"checkpoint\.json has format 99, but this onnxpar reads format 3; update onnxpar",
        ),
        ({"mesh": None}, r"checkpoint\.json is damaged, or not written by onnxpar"),
        ({"slots": [{"name": 1}]}, r"checkpoint\.json is damaged, or not written by onnxpar"),
    ],
)
def test_checkpoints_that_cannot_be_read(change: dict[str, Any], message: str, saved: Path) -> None:
    file = saved / "checkpoint.json"
    changed = json.loads(file.read_text()) | change
    file.write_text(json.dumps(changed))
    with pytest.raises(ModelError, match=r"checkpoint\.json has changed since it was written"):
        Checkpoint.load(saved)
    file.write_text(sealed(changed))
    with pytest.raises(ModelError, match=message):
        Checkpoint.load(saved)
    with pytest.raises(ModelError, match="has no checkpoint"):
        Checkpoint.load(saved.parent / "elsewhere")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"epochs": 0}, "--epochs 0: must be at least 1"),
        ({"resume": True}, "--resume: the folder of checkpoints is not given"),
        ({"schedule": Schedule(warmup=6)}, "--warmup 6: the run has 5 steps"),
        ({"rate": float("nan")}, "--lr nan: the learning rate must be finite"),
        ({"every": -1}, "--every -1: give the number of steps between checkpoints"),
        ({"seed": -1}, "--seed -1: must be from 0 to 2147483647"),
        ({"seed": 1 << 31}, "--seed 2147483648: must be from 0 to"),
    ],
)
def test_runs_that_do_not_fit(how: dict[str, Any], message: str, step: Path) -> None:
    par, _ = shard(step, "data-parallel 2")
    with ThreadTrainer(par) as trainer, pytest.raises(InputError, match=message):
        list(records(trainer, data_for(trainer), Run(**({"epochs": 1, "rate": 0.1} | how))))


def test_another_seed_is_no_resumption(step: Path, tmp_path: Path) -> None:
    par, _ = shard(step, "data-parallel 2")
    train(par, Run(1, 0.1, seed=3, checkpoint=tmp_path / "c"))
    with pytest.raises(InputError, match="belongs to another run: --seed 3, now 4; give what"):
        train(par, Run(2, 0.1, seed=4, checkpoint=tmp_path / "c", resume=True))


def test_what_is_no_training_step(tmp_path: Path) -> None:
    par, _ = shard(write_model(MLP, tmp_path), "data-parallel 2")
    with pytest.raises(ModelError, match="is not a training step; write one with `onnxpar grad`"):
        ThreadTrainer(par)


def test_a_step_of_gradients_alone_is_not_trained(tmp_path: Path) -> None:
    par, _ = shard(write_step(MLP, tmp_path, optimizer="none"), "data-parallel 2")
    with pytest.raises(ModelError, match="updates nothing"):
        ThreadTrainer(par)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["zero3 2", "tensor-parallel 2", "data-parallel 2"])
def test_merging_gives_a_plain_model(layout: str, step: Path, tmp_path: Path) -> None:
    """Whose outputs are those of the trained parameters; what was not trained is as it was."""
    par, _ = shard(step, layout)
    _, left = train(par, Run(1, 0.02, checkpoint=tmp_path / "c"))
    model, trained = tmp_path / "model.onnx", tmp_path / "trained.onnx"
    assert merge(tmp_path / "c", model, trained) == 4
    before, after = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(p).graph.initializer}
        for p in (model, trained)
    )
    assert before.keys() == after.keys()
    same(after, {name: left[name] for name in after})
    x = samples(8)["x"]
    (y,) = ort.InferenceSession(str(trained), quiet()).run(None, {"x": x})
    hidden = np.maximum(x @ left["w1"] + left["w2"], 0)
    np.testing.assert_allclose(y, hidden @ left["w3"] + left["w4"], rtol=1e-5, atol=1e-5)
    told, _ = run_unsplit(step, [{"x": x, "labels": samples(8)["labels"]}], [0.0])
    assert not np.allclose(told[0]["w1.next"], left["w1"])


def test_merging_takes_running_statistics_too(tmp_path: Path) -> None:
    step = write_step(CONV, tmp_path, optimizer="sgd", batch_norm="global")
    par, _ = shard(step, "data-parallel 2")
    draw = np.random.default_rng(1)
    batch = {
        "x": 3 + draw.standard_normal((8, 2, 6, 6)).astype(np.float32),
        "labels": draw.integers(0, 3, 8),
    }
    with ThreadTrainer(par) as trainer:
        data = Data.of(batch, trainer.data, trainer.spec.batch)
        list(records(trainer, data, Run(3, 0.1, checkpoint=tmp_path / "c")))
        mean = trainer.session.states.read("mean")
    assert merge(tmp_path / "c", tmp_path / "model.onnx", tmp_path / "trained.onnx") == 8
    after = {
        t.name: numpy_helper.to_array(t)
        for t in onnx.load(tmp_path / "trained.onnx").graph.initializer
    }
    np.testing.assert_array_equal(after["mean"], mean)
    assert np.abs(mean).max() > 0.1


def test_models_that_a_checkpoint_does_not_fit(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    wider = write_model(MLP.replace("9", "7"), other)
    with pytest.raises(ModelError, match=r"'w1' .* \[6, 7\], but \[6, 9\] in the checkpoint"):
        merge(saved, wider, other / "out.onnx")
    renamed = write_model(MLP.replace("w3", "wide"), other)
    with pytest.raises(ModelError, match=r"has no weight 'w3', which the checkpoint .* has; give"):
        merge(saved, renamed, other / "out.onnx")
    with pytest.raises(OnnxparError, match="no such folder for the output"):
        merge(saved, tmp_path / "model.onnx", tmp_path / "none" / "out.onnx")
    with pytest.raises(ModelError, match="has no checkpoint"):
        merge(other, tmp_path / "model.onnx", other / "out.onnx")
    assert sorted(p.name for p in other.iterdir()) == ["model.onnx"]


def test_a_folder_of_another_run_is_not_mixed_up(step: Path, tmp_path: Path) -> None:
    """A new run would be resumed from the old one's checkpoint of a later step."""
    par, _ = shard(step, "data-parallel 2")
    train(par, Run(2, 0.02, checkpoint=tmp_path / "c"))
    with pytest.raises(InputError, match=r"step_00000010.*--resume"):
        train(par, Run(1, 0.02, checkpoint=tmp_path / "c"))
