"""Training with samples of several lengths: a program of the step for each, with one set of
states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from committed import MODELS
from training.steps import ThreadTrainer, options, quiet, same, states, write_step

import onnxpar
from onnxpar.base.errors import InputError, StrategyError
from onnxpar.cli.command_line import main
from onnxpar.graph.training_spec import Step
from onnxpar.planner import sharder
from onnxpar.runtime.session.bundle import NodeArg
from onnxpar.trainer.data import Data, Rest
from onnxpar.trainer.loop import Run, evaluate, records
from onnxpar.trainer.step_plans import StepPlans
from onnxpar.training import grad
from onnxpar.training.optimizers import Momentum

Array = np.ndarray[Any, Any]
TEXT = """tagger (int64[BATCH,LENGTH] ids, float[BATCH,LENGTH] mask,
    float[11,6] w1, float[ROWS,6] w2, float[6,7] w3) => (float[BATCH,LENGTH,7] y) {
  one = Constant<value_ints = [1]>()
  two = Constant<value_ints = [2]>()
  zero = Constant<value_ints = [0]>()
  end = Constant<value_ints = [LENGTH]>()
  words = Gather(w1, ids)
  places = Slice(w2, zero, end)
  both = Add(words, places)
  m = Unsqueeze(mask, two)
  own = Mul(both, m)
  all = ReduceSum(own, one)
  h = Add(own, all)
  t = Tanh(h)
  y = MatMul(t, w3) }"""
LENGTHS = (9, 5, 2)
PAD = {"ids": 10.0, "mask": 0.0}


def write(length: int, folder: Path, batch: int = 4, rows: int = 9, **how: Any) -> Path:
    """The training step of samples that are so long."""
    sizes = {"LENGTH": length, "BATCH": batch, "ROWS": rows}
    text = TEXT
    for word, size in sizes.items():
        text = text.replace(word, str(size))
    step = write_step(text, folder, **{"optimizer": "momentum", **how})
    return step.rename(folder / f"step{length}.onnx")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: Any) -> list[Path]:
    """The steps of each length, the longest first."""
    folder: Path = tmp_path_factory.mktemp("steps")
    return [write(length, folder) for length in LENGTHS]


def sharded(steps: list[Path], layout: str = "data-parallel 2", name: str = "step.par") -> Path:
    """The folder of the longest step with all shorter ones."""
    par = steps[0].with_name(name)
    if not par.exists():
        sharder.shard(steps[0], par, options(layout), shorter=steps[1:])
    return par


def texts(lengths: Any, seed: int = 3) -> list[dict[str, Array]]:
    """Samples of these lengths."""
    draw = np.random.default_rng(seed)
    return [
        {
            "ids": draw.integers(0, 10, n),
            "mask": np.ones(n, np.float32),
            "labels": draw.integers(0, 7, n),
        }
        for n in lengths
    ]


def lengths_of(count: int, seed: int = 3) -> list[int]:
    draw = np.random.default_rng(seed)
    return [int(n) for n in np.minimum(draw.geometric(0.25, count), 9)]


class Unsplit:
    """Takes steps of several lengths in a stock onnxruntime, which knows nothing of ranks."""

    def __init__(self, steps: list[Path], lengths: tuple[int, ...]) -> None:
        self.sessions = {
            length: ort.InferenceSession(str(step), quiet(), ["CPUExecutionProvider"])
            for length, step in zip(lengths, steps, strict=True)
        }
        found = Step.of(onnx.load(steps[0]))
        assert found is not None
        self.step = found
        ports = {p.name: p for p in self.sessions[lengths[0]].get_inputs()}
        types = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
        self.states = {
            slot.input: np.zeros(ports[slot.input].shape, types[ports[slot.input].type])
            for slot in found.slots
            if not slot.default
        }

    def run(self, batch: Mapping[str, Array], rate: float) -> dict[str, Array]:
        """All outputs of a step on the batch, whose states are those before the next one."""
        session = self.sessions[next(iter(batch.values())).shape[1]]
        names = [port.name for port in session.get_outputs()]
        feeds = {**batch, **self.states, self.step.rate: np.array(rate, np.float32)}
        found = dict(zip(names, session.run(names, feeds), strict=True))
        self.states = {slot.input: found[slot.output] for slot in self.step.slots}
        return found


@pytest.mark.parametrize(
    "layout",
    ["data-parallel 3", "tensor-parallel 2", "zero1 2", "zero3 2", "hybrid dp=2,tp=2", "auto 2"],
)
def test_steps_of_any_length_in_turn(layout: str, steps: list[Path]) -> None:
    """Are those of a stock onnxruntime, to which each hands the states of the one before."""
    check_turns(sharded(steps, layout, layout.replace(" ", "_") + ".par"), steps)


def check_turns(par: Path, steps: list[Path], lengths: tuple[int, ...] = LENGTHS) -> None:
    unsplit = Unsplit(steps, lengths)
    order = [lengths[i] for i in (0, 2, 2, 1, 0, 0, 1, 2, 2, 2, 0)]
    with ThreadTrainer(par) as trainer:
        for number, length in enumerate(order):
            samples = texts(np.random.default_rng(number).integers(1, length + 1, 4), number)
            samples[0] = texts([length], number)[0]
            (batch,) = trainer.batches_of(samples, pad=PAD).epoch(0, None)
            assert batch["ids"].shape == (4, length)
            evaluated = trainer.evaluate(batch)
            wanted = unsplit.run(batch, 0.05)
            assert trainer.step(batch, 0.05)["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert evaluated["loss"] == pytest.approx(wanted["evaluation.loss"], rel=1e-5)
        for name, value in states(trainer).items():
            np.testing.assert_allclose(value, unsplit.states[name], 1e-4, 1e-6, err_msg=name)


@pytest.mark.parametrize("layout", ["zero1 2", "zero3 2"])
def test_states_that_each_length_would_split_otherwise(layout: str, tmp_path: Path) -> None:
    """Of a table of positions, each length reads other rows: it stays whole."""
    lengths = (8, 5, 4)
    steps = [write(length, tmp_path, rows=8) for length in lengths]
    alone = sharder.plan(steps[0], options(layout))[0]
    assert "dp" in {p.name: p.layout.text(alone.mesh) for p in alone.inputs}["w2.momentum_buffer"]
    par = sharded(steps, layout)
    plan = json.loads((par / "plan.json").read_text())
    layouts = {p["name"]: p["layout_text"] for p in (*plan["inputs"], *plan["outputs"])}
    assert {layouts[f"w2.momentum_buffer{end}"] for end in ("", ".next")} == {"[-, -]"}
    assert "dp" in layouts["w1.momentum_buffer"] and "dp" in layouts["w3.momentum_buffer"]
    assert [entry["sizes"] for entry in plan["lengths"]] == [[4], [5], [8]]
    assert plan["example"] == {"length": 8}
    check_turns(par, steps, lengths)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: Any) -> list[Path]:
    """The steps of BERT for 16 and for 7 tokens."""
    folder: Path = tmp_path_factory.mktemp("bert")
    for length in (16, 7):
        dims = {"batch": 8, "seq": length}
        step, how = folder / f"step{length}.onnx", {"optimizer": "momentum", "dims": dims}
        grad(MODELS / "bert.dynamo.dynamic.onnx", step, loss="softmax-cross-entropy", **how)
    return [folder / "step16.onnx", folder / "step7.onnx"]


@pytest.mark.parametrize(
    "layout", ["zero1 2", "auto 2", "tensor-parallel 2", "sequence-parallel 2"]
)
def test_inputs_that_each_length_would_split_otherwise(layout: str, bert: list[Path]) -> None:
    """BERT's, of which some plans split the batch of the tokens, and others gather them."""
    par = sharded(bert, layout, f"{layout.replace(' ', '_')}.par")
    unsplit = Unsplit(bert, (16, 7))
    with ThreadTrainer(par) as trainer:
        for number, length in enumerate((16, 7, 7, 16, 7)):
            draw = np.random.default_rng(number)
            mask = (np.arange(length) < draw.integers(1, length + 1, 8)[:, None]).astype(np.int64)
            batch = {
                "input_ids": draw.integers(1, 500, (8, length)) * mask,
                "attention_mask": mask,
                "token_type_ids": np.zeros((8, length), np.int64),
                "labels": draw.integers(0, 5, 8),
            }
            wanted = unsplit.run(batch, 0.01)
            assert trainer.step(batch, 0.01)["loss"] == pytest.approx(wanted["loss"], rel=2e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 3, 4, 5, 37, 64])
def test_every_sample_is_in_one_batch(count: int, seed: int) -> None:
    """The shortest one that holds it, unless too few are as short; all batches are full but one,
    and an epoch that goes on after any of them has the others."""
    draw = np.random.default_rng(seed)
    each = draw.integers(1, 10, count)
    ids = np.where(np.arange(9) < each[:, None], np.arange(1, count + 1)[:, None], 0)
    ports = [NodeArg("ids", "tensor(int64)", [4, 9]), NodeArg("labels", "tensor(int64)", [4])]
    shapes = [{"ids": (4, n), "labels": (4,)} for n in (2, 5, 9)]
    data = Data.of(
        {"ids": ids, "labels": np.arange(count)},
        ports,
        {"ids": 0, "labels": 0},
        Rest("labels", None),
        {"ids": 0},
        lengths=shapes,
    )
    found = list(data.epoch(2, seed))
    assert len(found) == data.batches == ceil(count / 4)
    seen = []
    for batch in found:
        used = batch["labels"] != -100
        longest = max(each[batch["labels"][used]])
        assert batch["ids"].shape[1] == next(n for n in (2, 5, 9) if n >= longest)
        np.testing.assert_array_equal(batch["ids"].max(1)[used], batch["labels"][used] + 1)
        seen += batch["labels"][used].tolist()
    assert sorted(seen) == list(range(count))
    full = [len(batch["labels"]) == (batch["labels"] != -100).sum() for batch in found]
    assert all(full[:-1])
    short = sum(each <= 2) // 4
    assert sum(batch["ids"].shape[1] == 2 for batch in found) in (short, short + 1)
    for first in range(len(found)):
        for batch, other in zip(found[first:], data.epoch(2, seed, 4 * first), strict=True):
            same(batch, other)


def test_several_dimensions() -> None:
    """Such as those of a source and a target, and one that is not behind that of the samples."""
    draw = np.random.default_rng(4)
    sizes = [(int(a), int(b)) for a, b in draw.integers(1, 7, (23, 2))]
    samples = []
    for i, (a, b) in enumerate(sizes):
        samples.append({"x": np.full((a, 3), i + 1.0, np.float32), "y": np.full(b, i + 1)})
    ports = [NodeArg("x", "tensor(float)", [6, 2, 3]), NodeArg("y", "tensor(int64)", [2, 6])]
    shapes = [{"x": (a, 2, 3), "y": (2, b)} for a, b in ((2, 6), (6, 2), (6, 6), (3, 3))]
    given = {"x": 1, "y": 0}, Rest("y", None, 0), {"x": 0, "y": 0}, "y"
    found = list(Data.of(samples, ports, *given, lengths=shapes).epoch(0, None))
    seen = []
    for batch in found:
        for i in range(2):
            number = int(batch["y"][i].max())
            if number > 0:
                seen.append(number)
                a, b = sizes[number - 1]
                assert (batch["x"][:, i] == number).all(1).sum() == a
                assert (batch["y"][i] == number).sum() == b
    assert sorted(seen) == list(range(1, 24))
    assert len({batch["x"].shape[0] for batch in found}) > 1


def test_a_run_is_that_of_filled_samples(steps: list[Path]) -> None:
    """Losses, weights and evaluation are those of the same batches at the greatest length."""
    samples = texts(lengths_of(30))
    with ThreadTrainer(sharded(steps)) as trainer:
        data = trainer.batches_of(samples, pad=PAD)
        sizes = [batch["ids"].shape[1] for batch in data.epoch(0, 0)]
        assert {*sizes} == {*LENGTHS} and len(sizes) == 8
        found = [r.values["loss"] for r in records(trainer, data, Run(2, 0.02))]
        told, left = evaluate(trainer, data), states(trainer)
    sharder.shard(steps[0], steps[0].with_name("one.par"), options("data-parallel 2"))
    with ThreadTrainer(steps[0].with_name("one.par")) as trainer:
        one = trainer.batches_of(samples, pad=PAD)
        wanted = []
        for epoch in range(2):
            for batch in data.epoch(epoch, 0):
                filled = {n: one.needs.filled(n, array, "") for n, array in batch.items()}
                wanted.append(trainer.step(filled, 0.02)["loss"])
        np.testing.assert_allclose(found, wanted, 2e-5)
        for name, value in states(trainer).items():
            np.testing.assert_allclose(left[name], value, 1e-3, 1e-5, err_msg=name)
        assert told["loss"] == pytest.approx(evaluate(trainer, one)["loss"], rel=2e-5)


def test_a_run_that_goes_on_is_one_that_never_ended(steps: list[Path], tmp_path: Path) -> None:
    """Also in the middle of an epoch; a step of one length takes the checkpoint, too."""
    samples = texts(lengths_of(30))
    with ThreadTrainer(sharded(steps)) as trainer:
        data = trainer.batches_of(samples, pad=PAD)
        wanted = [r.values["loss"] for r in records(trainer, data, Run(2, 0.02))]
        left = states(trainer)
    for first in (3, 8, 11):
        run = Run(2, 0.02, checkpoint=tmp_path / str(first), max_steps=first)
        with ThreadTrainer(sharded(steps)) as trainer:
            list(records(trainer, trainer.batches_of(samples, pad=PAD), run))
        with ThreadTrainer(sharded(steps)) as trainer:
            again = Run(2, 0.02, checkpoint=tmp_path / str(first), resume=True)
            data = trainer.batches_of(samples, pad=PAD)
            found = [r.values["loss"] for r in records(trainer, data, again)]
            assert found == wanted[first:]
            same(states(trainer), left)
    sharder.shard(steps[2], tmp_path / "short.par", options("data-parallel 2"))
    with ThreadTrainer(tmp_path / "short.par") as trainer:
        trainer.load(tmp_path / "3")
        batch = next(trainer.batches_of(texts([2, 1, 2, 2]), pad=PAD).epoch(0, None))
        short = trainer.step(batch, 0.02)
    with ThreadTrainer(sharded(steps)) as trainer:
        trainer.load(tmp_path / "3")
        assert trainer.step(batch, 0.02) == pytest.approx(short, rel=1e-6)


def test_faults_are_named(steps: list[Path], tmp_path: Path) -> None:
    def refused(shorter: Path, text: str, longest: Path = steps[0]) -> None:
        with pytest.raises(StrategyError, match=text):
            onnxpar.shard(longest, tmp_path / "x.par", devices=2, shorter=[shorter])
        assert not (tmp_path / "x.par").exists()

    refused(steps[0], "step9.onnx takes samples of the same sizes as .*step9.onnx")
    refused(steps[0], "step9.onnx takes longer samples than .*step2.onnx", steps[2])
    refused(write(4, tmp_path, optimizer="sgd"), "step4.onnx is another training step than")
    refused(write(4, tmp_path, label_smoothing=0.1), "its loss is another one")
    refused(write(4, tmp_path, clip_norm=0.5), "step4.onnx is another training step than")
    hyper = Momentum(weight_decay=0.5)
    refused(write(4, tmp_path, optimizer=hyper), "its hyperparameters differ")
    changed = onnx.load(steps[1])
    (weight,) = [t for t in changed.graph.initializer if t.name == "w1"]
    weight.CopyFrom(onnx.numpy_helper.from_array(np.ones((11, 6), np.float32), "w1"))
    onnx.save(changed, tmp_path / "changed.onnx")
    refused(tmp_path / "changed.onnx", "'w1' has other values")
    refused(
        write(3, tmp_path, loss="softmax-cross-entropy", batch=6), "step3.onnx takes batches of 6"
    )
    refused(tmp_path / "model.onnx", "model.onnx is no training step")
    with ThreadTrainer(sharded(steps)) as trainer:
        with pytest.raises(InputError, match="what fills those of 'ids' with --pad ids=VALUE"):
            trainer.batches_of(texts([2, 3, 4, 5]))
        batch = {n: np.stack([t[n] for t in texts([4] * 4)]) for n in ("ids", "mask", "labels")}
        with pytest.raises(InputError, match="lengths 2, 5, 9, and these have 4; fill them up"):
            trainer.step(batch, 0.1)


def test_the_commands(steps: list[Path], tmp_path: Path, capsys: Any) -> None:
    par, data = tmp_path / "step.par", tmp_path / "data.npz"
    shorter = [word for step in steps[1:] for word in ("--shorter", str(step))]
    assert main(["shard", str(steps[0]), *shorter, "--devices", "2", "-o", str(par)]) == 0
    with ThreadTrainer(par) as trainer:
        one = trainer.batches_of(texts(lengths_of(21)), pad=PAD).source.chunks(0, None, 0, 21)
        np.savez(data, **{n: a for n, a in next(iter(one)).items()})
    pad = ["--pad", "ids=10", "--pad", "mask=0", "--eval", str(data)]
    run = ["train", str(par), "--data", str(data), "--lr", "0.01", *pad]
    assert main([*run, "--log-dir", str(tmp_path / "log")]) == 0
    told = capsys.readouterr().out
    assert "(step 6 of the run)" in told and "predicted for the longest samples" in told
    assert main(["run", str(par), "--random"]) == 0
    assert "loss: float32 scalar" in capsys.readouterr().out
    assert main([*run[:6], "--log-dir", str(tmp_path / "log")]) == 2
    assert "say what fills those of 'ids'" in capsys.readouterr().err


def test_other_numbers_of_ranks(steps: list[Path], tmp_path: Path) -> None:
    """A step that is sharded again has all lengths."""
    par = sharded(steps)
    onnxpar.shard(steps[0], par, devices=2, shorter=steps[1:])
    plans = StepPlans(par, tmp_path)
    again = plans.at_most(3, 1)
    assert plans.at_most(3, 1) == again
    with ThreadTrainer(again) as trainer:
        assert trainer.session.ranks == 3
        assert [*trainer.bundle.programs] == [(2,), (5,), (9,)]
    steps[2].rename(tmp_path / "away.onnx")
    try:
        with pytest.raises(InputError, match=r"step2\.onnx is not there"):
            StepPlans(par, tmp_path)
    finally:
        (tmp_path / "away.onnx").rename(steps[2])
