"""A run goes on as the run that it continues, or says what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from training.models import DROPOUT
from training.steps import CROSS_ENTROPY, MLP, Array, ThreadTrainer, same, shard, states, write_step

from onnxpar.base.digests import sealed
from onnxpar.base.errors import InputError, ModelError
from onnxpar.trainer.checkpoint import Checkpoint, Progress
from onnxpar.trainer.loop import Run, records
from onnxpar.trainer.merge import merge
from onnxpar.trainer.rates import Schedule
from onnxpar.training import grad

DRAW = np.random.default_rng(5)


def samples(count: int = 21) -> dict[str, Array]:
    random = np.random.default_rng(1)
    x = random.standard_normal((count, 6)).astype(np.float32)
    return {"x": x, "labels": random.integers(0, 5, count)}


def train(par: Path, run: Run, data: dict[str, Array] | None = None) -> dict[str, Array]:
    """The states after a run."""
    with ThreadTrainer(par) as trainer:
        for _ in records(trainer, trainer.batches_of(data or samples()), run):
            pass
        return states(trainer)


def first_steps(par: Path, count: int, run: Run) -> None:
    """The steps of a run that then ends."""
    with ThreadTrainer(par) as trainer:
        made = records(trainer, trainer.batches_of(samples()), run)
        for _ in range(count + 1):
            next(made)


@pytest.fixture(scope="module")
def par(tmp_path_factory: Any) -> Path:
    return shard(write_step(MLP, tmp_path_factory.mktemp("m"), optimizer="adam"), "zero1 2")[0]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_from_any_step(par: Path, after: int, tmp_path: Path) -> None:
    """Of two epochs of three steps, of which the last has five samples."""
    how: dict[str, Any] = {"schedule": Schedule("cosine"), "checkpoint": tmp_path / "c", "every": 1}
    whole = train(par, Run(2, 0.05, schedule=Schedule("cosine")))
    first_steps(par, after, Run(2, 0.05, **how))
    saved = Checkpoint.load(tmp_path / "c").progress
    assert (saved.step, saved.samples) == (after, 8 * (after % 3))
    same(train(par, Run(2, 0.05, resume=True, **how)), whole)


@pytest.mark.parametrize(
    ("more", "data", "text"),
    [
        ({"shuffle": False}, {}, "shuffling on, now off"),
        ({"schedule": Schedule(warmup=2)}, {}, "--warmup 0, now 2"),
        (
            {"schedule": Schedule("linear")},
            {},
            "--schedule constant, now linear; give",
        ),
        ({}, samples(22), "21 samples, now 22; data of digest [0-9a-f]{16}, now"),
        ({}, {**samples(), "x": samples()["x"] + 1}, "data of digest [0-9a-f]{16}, now"),
    ],
)
def test_what_differs(
    par: Path, more: dict[str, Any], data: dict[str, Array], text: str, tmp_path: Path
) -> None:
    first_steps(par, 2, Run(2, 0.05, checkpoint=tmp_path / "c", every=1))
    now = {"checkpoint": tmp_path / "c", "resume": True, **more}
    with pytest.raises(InputError, match=f"step_00000002 belongs to another run: .*{text}"):
        train(par, Run(2, 0.05, **now), data)
    train(par, Run(2, 0.05, allow_changed=True, **now), data)
    assert Checkpoint.load(tmp_path / "c").progress.epoch == 2


def test_other_rates_and_more_epochs_are_no_other_run(par: Path, tmp_path: Path) -> None:
    train(par, Run(1, 0.05, checkpoint=tmp_path / "c"))
    train(par, Run(2, 0.01, checkpoint=tmp_path / "c", resume=True))
    assert Checkpoint.load(tmp_path / "c").progress.step == 6


def test_another_batch_size_goes_on_with_the_next_sample(par: Path, tmp_path: Path) -> None:
    other, _ = shard(write_step(MLP.replace("[8,", "[5,"), tmp_path, optimizer="adam"), "zero1 2")
    run = Run(1, 0.05, checkpoint=tmp_path / "c", every=1, shuffle=False)
    first_steps(par, 1, run)
    again = Run(1, 0.05, checkpoint=tmp_path / "c", shuffle=False, resume=True, allow_changed=True)
    with ThreadTrainer(other) as trainer:
        trainer.load(tmp_path / "c")
        for start in (8, 13, 18):
            part = {name: array[start : start + 5] for name, array in samples().items()}
            (batch,) = trainer.batches_of(part).epoch(0, None)
            trainer.step(batch, 0.05)
        wanted = states(trainer)
    same(train(other, again), wanted)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("layout", ["zero1 2", "tensor-parallel 3", "hybrid dp=2,tp=2"])
@pytest.mark.parametrize("how", [{"frozen": ["w1"]}, {"params": ["w2"]}])
def test_trained_weights_that_a_step_freezes(
    par: Path, layout: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """They come back trained, stay so, and are in the checkpoints of the run that goes on."""
    step = write_step(MLP, tmp_path, optimizer="adam", **how)
    frozen, _ = shard(step, layout)
    train(par, Run(1, 0.05, checkpoint=tmp_path / "c"))
    train(frozen, Run(1, 0.05, checkpoint=tmp_path / "fresh"))
    assert "w1" not in {slot.input for slot in Checkpoint.load(tmp_path / "fresh").slots}
    before = Checkpoint.load(tmp_path / "c").states.read("w1")
    train(frozen, Run(3, 0.05, checkpoint=tmp_path / "c", resume=True))
    np.testing.assert_array_equal(Checkpoint.load(tmp_path / "c").states.read("w1"), before)
    merged = tmp_path / "merged.onnx"
    merge(tmp_path / "c", step.with_name("model.onnx"), merged)
    x, labels = samples()["x"][:8], samples()["labels"][:8]
    scores = ort.InferenceSession(merged).run(None, {"x": x})[0]
    losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(8), labels]
    with ThreadTrainer(frozen) as trainer:
        first = trainer.session.states.read("w1")
        trainer.load(tmp_path / "c")
        found = trainer.evaluate({"x": x, "labels": labels})["loss"]
        assert found == pytest.approx(losses.mean(), rel=1e-5)
        trainer.load(tmp_path / "fresh")
        np.testing.assert_array_equal(trainer.session.states.read("w1"), first)
    assert (first != before).any()


@pytest.mark.parametrize("layout", ["zero1 3", "tensor-parallel 2"])
def test_weights_that_a_step_trains_from_now_on(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their optimizer has no state, so that of all starts anew, as a new one in torch would."""
    (tmp_path / "head").mkdir()
    head = write_step(MLP, tmp_path / "head", optimizer="adam", params=["w3", "w4"])
    train(shard(head, "zero1 2")[0], Run(1, 0.05, checkpoint=tmp_path / "c"))
    merge(tmp_path / "c", tmp_path / "head" / "model.onnx", tmp_path / "merged.onnx")
    whole, _ = shard(write_step(MLP, tmp_path, optimizer="adam"), layout)
    grad(tmp_path / "merged.onnx", tmp_path / "new.onnx", loss=CROSS_ENTROPY, optimizer="adam")
    with ThreadTrainer(whole) as trainer:
        with pytest.raises(ModelError, match=r"has no 'w1'; .* --allow-changed to start"):
            trainer.load(tmp_path / "c")
        trainer.load(tmp_path / "c", allow_changed=True)
        assert "has no 'w1' and 5 other states: the optimizer, and" in capsys.readouterr().err
        batches = list(trainer.batches_of(samples()).epoch(0, None))
        for batch in batches:
            trainer.step(batch, 0.05)
        found = states(trainer)
    with ThreadTrainer(shard(tmp_path / "new.onnx", layout)[0]) as trainer:
        for batch in batches:
            trainer.step(batch, 0.05)
        same(found, states(trainer))


def test_weights_that_a_step_does_not_have(par: Path, tmp_path: Path) -> None:
    with ThreadTrainer(par) as trainer:
        trainer.save(tmp_path / "c", Progress(3))
    sgd, _ = shard(write_step(MLP, tmp_path), "zero1 2")
    with ThreadTrainer(sgd) as trainer, pytest.raises(ModelError, match="another optimizer wrote"):
        trainer.load(tmp_path / "c")


def test_steps_without_a_seed_draw_anew(tmp_path: Path) -> None:
    """And a trainer that goes on draws what the first one would have drawn."""
    dropout, _ = shard(write_step(DROPOUT, tmp_path), "data-parallel 2")
    batch = {"x": DRAW.standard_normal((8, 6)).astype(np.float32), "labels": DRAW.integers(0, 5, 8)}
    with ThreadTrainer(dropout) as trainer:
        losses = [trainer.step(batch, 0.0)["loss"] for _ in range(3)]
        trainer.save(tmp_path / "c", Progress(3))
        losses += [trainer.step(batch, 0.0)["loss"] for _ in range(2)]
        assert len({*losses}) == 5
        assert trainer.step(batch, 0.0, seed=1)["loss"] == losses[1]
    with ThreadTrainer(dropout) as trainer:
        trainer.load(tmp_path / "c")
        assert [trainer.step(batch, 0.0)["loss"] for _ in range(2)] == losses[3:]


def test_checkpoints_that_count_steps_are_read_between_epochs(par: Path, tmp_path: Path) -> None:
    train(par, Run(1, 0.05, checkpoint=tmp_path / "c"))
    record = tmp_path / "c" / "step_00000003" / "checkpoint.json"
    data = json.loads(record.read_text())
    data |= {"format": 2, "progress": {"step": 3, "epoch": 1, "in_epoch": 0, "seed": 0}}
    record.write_text(sealed({k: v for k, v in data.items() if k != "sha256"}))
    train(par, Run(2, 0.05, checkpoint=tmp_path / "c", resume=True))
    data["progress"] |= {"in_epoch": 1, "epoch": 0}
    record.write_text(sealed({k: v for k, v in data.items() if k != "sha256"}))
    with pytest.raises(ModelError, match="an older onnxpar wrote it in the middle of an epoch"):
        Checkpoint.load(record.parent)


OWN = """m (float[5,6] x, float[6,5] w) => (float l)
{ y = MatMul(x, w)  s = Mul(y, y)  l = ReduceMean<keepdims = 0>(s) }"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [20, 21, 13, 12])
def test_an_epoch_whose_last_samples_fill_no_batch_of_another_size_ends(
    count: int, tmp_path: Path
) -> None:
    """A loss of the model's own cannot leave out samples that only fill a batch."""
    (tmp_path / "8").mkdir()
    first = shard(write_step(OWN.replace("[5,6]", "[8,6]"), tmp_path / "8", "l"), "data-parallel 2")
    other, _ = shard(write_step(OWN, tmp_path, "l"), "data-parallel 2")
    run = Run(2, 0.05, checkpoint=tmp_path / "c", every=1, shuffle=False)
    with ThreadTrainer(first[0]) as trainer:
        made = records(trainer, trainer.batches_of({"x": samples(20)["x"]}), run)
        next(made), next(made)
    again = replace(run, resume=True, allow_changed=True)
    with ThreadTrainer(other) as trainer:
        data = trainer.batches_of({"x": samples(count)["x"]})
        told = [(each.epoch, each.step) for each in records(trainer, data, again)]
    rest = (count - 8) // 5
    assert told == [(1, 3 + i) for i in range(rest)] + [(2, 1 + i) for i in range(count // 5)]
    assert Checkpoint.load(tmp_path / "c").progress.epoch == 2
