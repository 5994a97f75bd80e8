"""Gradients that travel in fewer bits: what each rank sends, by NumPy, on numbers that are exact in
any order; and what a run keeps of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from agreement import options
from training.steps import CROSS_ENTROPY, ThreadTrainer, write_step

from onnxpar.base.errors import DivergenceError, ModelError
from onnxpar.cli.command_line import main
from onnxpar.layout.layout import nested_parts
from onnxpar.planner import sharder
from onnxpar.report.compare_training import compare_training
from onnxpar.trainer.checkpoint import Checkpoint, Progress
from onnxpar.trainer.trainer import Trainer

Array = npt.NDArray[Any]
Batch = dict[str, Array]
Parts = dict[str, list[Array]]

ROWS, RATE, THRESHOLD = 8, 1 / 256, 32.0
SQUARES = f"""squares (float[{ROWS},40] x, float[{ROWS},51] z, float[{ROWS},26] t,
float[40,26] w1, float[51,26] w2) => (float total)
{{ a = MatMul(x, w1)  b = MatMul(z, w2)  y = Add(a, b)  d = Sub(y, t)  q = Mul(d, d)
  total = ReduceSum<keepdims = 0>(q) }}"""
TWO_BIT = f"2bit:{THRESHOLD}"


def numbers(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def make_batches(count: int, first: int = 0, dtype: str = "float32") -> list[Batch]:
    """Small integers."""
    return [
        {
            name: numbers(seed).integers(-most, most + 1, (ROWS, width)).astype(dtype)
            for seed, (name, width, most) in enumerate(
                (("x", 40, 2), ("z", 51, 2), ("t", 26, 8)), 3 * number
            )
        }
        for number in range(first, first + count)
    ]


def first_weights(dtype: str = "float32") -> dict[str, Array]:
    """Multiples of an eighth."""
    return {
        name: (numbers(rows).integers(-8, 9, (rows, 26)) / 8).astype(dtype)
        for name, rows in (("w1", 40), ("w2", 51))
    }


Send = Callable[[Array, Array], tuple[Array, Array]]
"""From what a rank has of a gradient, and what it kept, to what it sends and keeps."""


def send_codes(addend: Array, kept: Array) -> tuple[Array, Array]:
    total = addend + kept
    sent = THRESHOLD * ((total >= THRESHOLD).astype(total.dtype) - (total <= -THRESHOLD))
    return sent.astype(total.dtype), total - sent


@dataclass
class Simulation:
    """The training step on several ranks, by NumPy."""

    weights: dict[str, Array]
    ranks: int
    kept: Parts

    @staticmethod
    def start(ranks: int, dtype: str = "float32") -> Simulation:
        weights = first_weights(dtype)
        kept = {name: [np.zeros_like(w)] * ranks for name, w in weights.items()}
        return Simulation(weights, ranks, kept)

    def gradients(self, batch: Batch) -> Parts:
        """What each rank adds to the gradients."""
        ends = np.cumsum(nested_parts(ROWS, (self.ranks,)))[:-1]
        away = batch["x"] @ self.weights["w1"] + batch["z"] @ self.weights["w2"] - batch["t"]
        parts = {name: np.split(a, ends) for name, a in (*batch.items(), ("away", away))}
        return {
            name: [2 * a.T @ d for a, d in zip(parts[source], parts["away"], strict=True)]
            for name, source in (("w1", "x"), ("w2", "z"))
        }

    def step(self, batch: Batch) -> None:
        """Sends codes."""
        for name, addends in self.gradients(batch).items():
            told = [send_codes(g, r) for g, r in zip(addends, self.kept[name], strict=True)]
            self.kept[name] = [rest for _, rest in told]
            dtype = self.weights[name].dtype.type
            total = np.sum([sent for sent, _ in told], axis=0)
            self.weights[name] = self.weights[name] - total * dtype(RATE)

    def totals(self) -> dict[str, Array]:
        return {name: np.sum(parts, axis=0) for name, parts in self.kept.items()}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return write_step(SQUARES, tmp_path, "total")


def shard(step: Path, layout: str, to: str | None, **how: Any) -> Path:
    par = step.with_name(f"{layout.replace(' ', '_')}_{to}.par")
    sharder.shard(step, par, replace(options(layout), compression=to, **how))
    return par


def of_batch(layout: str) -> int:
    """How many parts of the batch there are."""
    return 2 if "hybrid" in layout else int(layout[-1])


def start(par: Path, weights: dict[str, Array]) -> ThreadTrainer:
    trainer = ThreadTrainer(par)
    for name, array in weights.items():
        trainer.session.states.write(name, array)
    return trainer


def take(trainer: Trainer, batches: Sequence[Batch]) -> list[float]:
    return [trainer.step(batch, RATE)["loss"] for batch in batches]


def check_weights(trainer: Trainer, expected: dict[str, Array]) -> None:
    for name, array in expected.items():
        found = trainer.session.states.read(name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array, name)


def check_kept(trainer: Trainer, simulation: Simulation, folder: Path) -> None:
    """Totals as the session reads them, and each rank's own as it writes them."""
    for name, total in simulation.totals().items():
        np.testing.assert_array_equal(trainer.session.states.read(f"{name}.residual"), total, name)
    folder.mkdir()
    trainer.session.states.save(folder)
    for rank in range(simulation.ranks):
        index = json.loads((folder / f"rank_{rank:04d}.json").read_text())
        data = (folder / f"rank_{rank:04d}.bin").read_bytes()
        for name, parts in simulation.kept.items():
            entry = index[f"{name}.residual"]
            count = parts[rank].size
            own = np.frombuffer(data, entry["dtype"], count, entry["offset"])
            np.testing.assert_array_equal(own.reshape(entry["shape"]), parts[rank], name)


@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("fusion", ["size", "none"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_send_codes_and_keep_the_rest(
    ranks: int, fusion: str, step: Path, tmp_path: Path
) -> None:
    simulation = Simulation.start(ranks)
    with start(shard(step, f"data-parallel {ranks}", TWO_BIT, fusion=fusion), first_weights()) as t:
        for batch in make_batches(6):
            take(t, [batch])
            simulation.step(batch)
            check_weights(t, simulation.weights)
        check_kept(t, simulation, tmp_path / "kept")
    assert all(np.abs(total).max() > THRESHOLD / 2 for total in simulation.totals().values())


@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("layout", ["zero1 2", "zero3 2", "hybrid dp=2,tp=2", "hybrid dp=2,tp=3"])
def test_gradients_in_parts(layout: str, step: Path) -> None:
    """What ranks hold in parts, evenly or not, is what they would hold whole."""
    simulation = Simulation.start(2)
    with start(shard(step, layout, TWO_BIT), first_weights()) as trainer:
        take(trainer, make_batches(5))
        for batch in make_batches(5):
            simulation.step(batch)
        check_weights(trainer, simulation.weights)
        for name, total in simulation.totals().items():
            kept = trainer.session.states.read(f"{name}.residual")
            np.testing.assert_array_equal(kept, total)


def test_codes_of_float64(tmp_path: Path) -> None:
    step = write_step(SQUARES.replace("float", "double"), tmp_path, "total")
    simulation = Simulation.start(2, "float64")
    with start(shard(step, "data-parallel 2", TWO_BIT), first_weights("float64")) as trainer:
        take(trainer, make_batches(3, dtype="float64"))
        for batch in make_batches(3, dtype="float64"):
            simulation.step(batch)
        check_weights(trainer, simulation.weights)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["data-parallel 2", "data-parallel 3", "zero2 2"])
@pytest.mark.parametrize("wire", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_16_bits_on_the_wire(wire: Any, layout: str, step: Path) -> None:
    """Ranks round what they send; the sum is rounded once."""
    simulation = Simulation.start(int(layout[-1]))
    (batch,) = make_batches(1)
    scaled = {**batch, "z": batch["z"] * np.float32(7)}
    expected = {}
    for name, addends in simulation.gradients(scaled).items():
        summed = sum(a.astype(wire).astype(np.float32) for a in addends)
        expected[name] = simulation.weights[name] - summed.astype(wire).astype(np.float32) / 256
        assert not np.array_equal(summed.astype(wire).astype(np.float32), sum(addends))
    with start(shard(step, layout, np.dtype(wire).name), first_weights()) as trainer:
        take(trainer, [scaled])
        check_weights(trainer, expected)


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_none_on_all_ranks(bad: float, step: Path, tmp_path: Path) -> None:
    """One rank's gradient spoils the step, and what ranks keep stays as it was."""
    simulation = Simulation.start(2)
    good, spoilt = make_batches(2)
    spoilt["x"][-1, 3] = bad
    with start(shard(step, "data-parallel 2", TWO_BIT), first_weights()) as trainer:
        take(trainer, [good])
        with pytest.raises(DivergenceError, match="the loss is"):
            take(trainer, [spoilt])
        simulation.step(good)
        check_kept(trainer, simulation, tmp_path / "kept")
        check_weights(trainer, simulation.weights)


def resumed(path: Path, par: Path) -> ThreadTrainer:
    trainer = ThreadTrainer(par)
    trainer.load(Checkpoint.load(path))
    return trainer


@pytest.mark.usefixtures("medium")
def test_a_run_goes_on_as_if_it_had_not_stopped(step: Path, tmp_path: Path) -> None:
    """Each rank goes on with its own residual."""
    par, simulation = shard(step, "data-parallel 3", TWO_BIT), Simulation.start(3)
    with start(par, first_weights()) as trainer:
        take(trainer, make_batches(3))
        trainer.save(tmp_path / "run", Progress(3))
    with resumed(tmp_path / "run", par) as trainer:
        take(trainer, make_batches(3, 3))
        for batch in make_batches(6):
            simulation.step(batch)
        check_weights(trainer, simulation.weights)
        check_kept(trainer, simulation, tmp_path / "kept")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "before,after",
    [
        ("data-parallel 3", "data-parallel 4"),
        ("data-parallel 4", "hybrid dp=2,tp=2"),
        ("hybrid dp=2,tp=2", "hybrid tp=2,dp=2"),
    ],
)
def test_another_mesh_goes_on_with_the_total(
    before: str, after: str, step: Path, tmp_path: Path
) -> None:
    """The first rank along the batch has it."""
    simulation = Simulation.start(of_batch(before))
    with start(shard(step, before, TWO_BIT), first_weights()) as trainer:
        take(trainer, make_batches(3))
        trainer.save(tmp_path / "run", Progress(3))
    for batch in make_batches(3):
        simulation.step(batch)
    ranks = of_batch(after)
    kept = {
        name: [total, *[np.zeros_like(total)] * (ranks - 1)]
        for name, total in simulation.totals().items()
    }
    simulation = Simulation(simulation.weights, ranks, kept)
    with resumed(tmp_path / "run", shard(step, after, TWO_BIT)) as trainer:
        take(trainer, make_batches(3, 3))
        for batch in make_batches(3, 3):
            simulation.step(batch)
        check_weights(trainer, simulation.weights)


def test_compression_may_begin_and_end_with_a_checkpoint(step: Path, tmp_path: Path) -> None:
    plain, compressed = (shard(step, "data-parallel 2", to) for to in (None, TWO_BIT))
    simulation = Simulation.start(2)
    with start(plain, first_weights()) as trainer:
        trainer.save(tmp_path / "plain", Progress())
    with ThreadTrainer(compressed) as trainer:
        take(trainer, make_batches(2))
        trainer.load(Checkpoint.load(tmp_path / "plain"))
        take(trainer, make_batches(2))
        trainer.save(tmp_path / "compressed", Progress(2))
    for batch in make_batches(2):
        simulation.step(batch)
    with resumed(tmp_path / "compressed", plain) as trainer:
        check_weights(trainer, simulation.weights)


def test_a_checkpoint_that_lacks_a_rank(step: Path, tmp_path: Path) -> None:
    par = shard(step, "data-parallel 2", TWO_BIT)
    with start(par, first_weights()) as trainer:
        trainer.save(tmp_path, Progress())
        (tmp_path / "step_00000000" / "rank_0001.bin").write_bytes(b"")
        with pytest.raises(ModelError, match=r"rank_0001\.bin has 0 bytes"):
            trainer.load(Checkpoint.load(tmp_path))
        check_weights(trainer, first_weights())


@pytest.mark.usefixtures("medium")
def test_processes_keep_their_own(step: Path, tmp_path: Path) -> None:
    par, simulation = shard(step, "data-parallel 2", TWO_BIT), Simulation.start(2)
    with start(par, first_weights()) as trainer:
        trainer.save(tmp_path / "run", Progress())
    with Trainer(par, timeout=60) as trainer:
        trainer.load(Checkpoint.load(tmp_path / "run"))
        for batch in make_batches(3):
            take(trainer, [batch])
            simulation.step(batch)
        trainer.save(tmp_path / "later", Progress(3))
        trainer.session.states.reset()
        trainer.load(Checkpoint.load(tmp_path / "later"))
        check_weights(trainer, simulation.weights)
        check_kept(trainer, simulation, tmp_path / "kept")


CLASSES, WIDTH = 10, 20
MLP = f"""mlp (float[64,{WIDTH}] x, float[{WIDTH},64] w1, float[64] w2, float[64,{CLASSES}] w3,
float[{CLASSES}] w4) => (float[64,{CLASSES}] y)
{{ h = Gemm(x, w1, w2)  r = Relu(h)  y = Gemm(r, w3, w4) }}"""


def clusters(count: int) -> list[Batch]:
    """Points around one centre for each class."""
    random = numbers(0)
    centres = random.standard_normal((CLASSES, WIDTH))
    found = []
    for _ in range(count):
        labels = random.integers(0, CLASSES, 64)
        x = (centres[labels] + random.standard_normal((64, WIDTH))).astype(np.float32)
        found.append({"x": x, "labels": labels})
    return found


def final_loss(par: Path, batches: Sequence[Batch], forget: bool = False) -> float:
    """Of the last steps of a run; one that forgets keeps nothing from step to step."""
    told = []
    with ThreadTrainer(par) as trainer:
        kept = [s.input for s in trainer.spec.slots if s.kind == "residual"]
        zeros = {name: np.zeros_like(trainer.session.states.read(name)) for name in kept}
        for batch in batches:
            told.append(trainer.step(batch, 0.1)["loss"])
            for name in kept if forget else ():
                trainer.session.states.write(name, zeros[name])
    return float(np.mean(told[-30:]))


@pytest.mark.slow
def test_what_is_kept_makes_training_converge(tmp_path: Path) -> None:
    """As well as with whole gradients; without it what is below the threshold would be lost."""
    step, batches = write_step(MLP, tmp_path, CROSS_ENTROPY), clusters(300)
    whole = final_loss(shard(step, "data-parallel 2", None), batches)
    par = shard(step, "data-parallel 2", "2bit:0.3")
    assert final_loss(par, batches) < 1.1 * whole  # 0.95
    assert final_loss(par, batches, forget=True) > 3 * whole  # 5.1


@pytest.mark.slow
@pytest.mark.parametrize("to", ["bfloat16", "2bit"])
def test_a_comparison_judges_what_comes_before_the_first_update(to: str, tmp_path: Path) -> None:
    step, batches = write_step(MLP, tmp_path, CROSS_ENTROPY), clusters(12)
    with ThreadTrainer(shard(step, "data-parallel 2", to)) as trainer:
        report = compare_training(step, trainer, batches, 0.1)
    assert report.ok
    judged = {row.name for row in report.rows if np.isfinite(row.tolerance)}
    assert judged == {"loss, first step"}
    assert {"w1", "w3"} <= {row.name for row in report.rows}


def test_check(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--devices", "2", "--preset", "data-parallel", "--compression", TWO_BIT]
    assert main(["check", str(step), *how]) == 0
    out = capsys.readouterr().out
    assert "w1.residual" in out and "all outputs agree" in out
