"""Tables on the host train to the bit like tables in memory, and to what one rank trains to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from small_models import HEAD, write_text
from training.steps import (
    Array,
    ThreadTrainer,
    batches,
    plan_of,
    same,
    shard,
    states,
    write_step,
)
from training.test_lazy import MODEL, rows

import onnxpar
from onnxpar.base.errors import RunError, StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.report.compare_training import compare_training
from onnxpar.report.plan_text import plan_lines
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.trainer.checkpoint import Progress

HOST = {"place": {"w": "host"}}
BY_ROWS = {"tensors": {"w": ["tp", None], "w.*": ["tp", None]}}
BY_COLUMNS = {"tensors": {"w": [None, "tp"]}}
WHOLE = {"tensors": {"w": [None, "tp@1"]}}
BY_HAND = {"tensors": {name: [{"tp": [30, 0, 10]}, None] for name in ("w", "w.*")}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("dp=1", {}),
    "by samples over 3": ("data-parallel 3", {}),
    "rows over 3": ("tp=3", BY_ROWS),
    "rows of the weight alone over 2": ("tp=2", {"tensors": {"w": ["tp", None]}}),
    "rows by hand, one part empty": ("tp=3", BY_HAND),
    "columns over 5, more than columns each": ("tp=5", BY_COLUMNS),
    "zero1 over 3": ("zero1 3", {}),
    "zero2 over 5, as many as samples": ("zero2 5", {}),
    "zero3 over 2": ("zero3 2", {}),
    "zero1 over 2, tensor-parallel over 2": ("zero1 dp=2,tp=2", {}),
    "zero3 over 2, tensor-parallel over 2": ("zero3 dp=2,tp=2", {}),
    "whole on rank 1": ("tp=2", WHOLE),
    "rows over 2, samples over 2": (
        "dp=2,tp=2",
        {"tensors": {**BY_ROWS["tensors"], "ids": ["dp", None]}},
    ),
}


def feeds_of(plan: Plan, count: int) -> Iterator[dict[str, Array]]:
    draw = np.random.default_rng(3)
    for batch in batches(plan, count):
        yield batch | {name: rows(draw, batch[name].shape) for name in ("ids", "more")}


def step_of(folder: Path, optimizer: str = "adam", batch: int = 5, **how: Any) -> Path:
    text = MODEL.replace("BATCH", str(batch))
    return write_step(text, folder, "mse", optimizer, lazy=["w"], **how)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training(layout: str, optimizer: str, tmp_path: Path) -> None:
    """Indices repeat, also between the two lookups and between ranks, and some are negative. In
    memory, zero3 sums up SGD's new rows instead of their gradients, because SGD is linear."""
    mesh, how = LAYOUTS[layout]
    (tmp_path / "memory").mkdir()
    found = []
    for folder, place in ((tmp_path, HOST), (tmp_path / "memory", {})):
        step = step_of(folder, optimizer)
        par, plan = shard(step, mesh, strategy={**how, **place})
        slots = {s.input for s in plan.step.slots if s.of == "w"} if plan.step else set()
        assert Bundle.load(par).row_outputs.keys() == (slots if place else set())
        feeds = list(feeds_of(plan, 3))
        with ThreadTrainer(par) as trainer:
            if place:
                report = compare_training(step, trainer, feeds, 0.05)
                assert report.ok, report.text()
                trainer.session.states.reset()
            losses = [trainer.step(batch, 0.05) for batch in feeds]
            evaluated = trainer.evaluate(feeds[0])
            found.append((losses, evaluated, states(trainer)))
    if "zero3" in mesh and optimizer == "sgd":
        for name, value in found[0][2].items():
            np.testing.assert_allclose(value, found[1][2][name], rtol=1e-5, atol=1e-6)
        return
    assert found[0][:2] == found[1][:2]
    same(found[0][2], found[1][2])


@pytest.mark.matrix
@pytest.mark.parametrize("how", [{"clip_norm": 0.1}, {"precision": "float16"}])
def test_options_of_steps(how: dict[str, Any], tmp_path: Path) -> None:
    """Float16 has a dynamic loss scale: a step whose gradients overflow changes no row."""
    step = step_of(tmp_path, "adagrad", **how)
    par, plan = shard(step, "tp=2", strategy={**BY_COLUMNS, **HOST})
    feeds = list(feeds_of(plan, 4))
    with ThreadTrainer(par) as trainer:
        report = compare_training(step, trainer, feeds, 0.05)
        assert report.ok, report.text()
        before = states(trainer)
        if "precision" in how:
            trainer.session.states.write("loss_scale", np.array(np.inf, np.float32))
            assert trainer.step(feeds[0], 0.05)["skipped"] == 1
            for name in ("w", "w.sum"):
                np.testing.assert_array_equal(trainer.session.states.read(name), before[name])


def test_mixed_precision_casts_rows(tmp_path: Path) -> None:
    """Not the whole table, so a table on the host need not be read whole."""
    plan = plan_of(step_of(tmp_path, precision="float16"), "tp=2", strategy={**BY_COLUMNS, **HOST})
    assert plan.on_host is not None
    assert plan.on_host.tensors == ["w", "w.exp_avg", "w.exp_avg_sq"]
    assert plan.on_host.bytes_per_rank == 3 * 40 * 3 * 4


def test_memory_counts_no_table(tmp_path: Path) -> None:
    text = MODEL.replace("BATCH", "5").replace("40", "4000")
    step = write_step(text, tmp_path, "mse", "adam", lazy=["w"])
    with_, without = (plan_of(step, "tp=2", strategy={**BY_ROWS, **p}) for p in (HOST, {}))
    assert without.memory["states_per_rank"] - with_.memory["states_per_rank"] == 3 * 2000 * 6 * 4
    assert with_.memory["activations_per_rank"] < without.memory["activations_per_rank"]
    assert [c.bytes for c in with_.collectives] == [c.bytes for c in without.collectives]


@pytest.mark.slow
def test_the_search_knows_tables_on_the_host(tmp_path: Path) -> None:
    """They take no memory, and an update takes the time of its rows."""
    text = MODEL.replace("BATCH", "4").replace("40", "400000")
    step = write_step(text, tmp_path, "mse", "adagrad", lazy=["w"])
    limit: dict[str, Any] = {"devices": 2, "memory_limit": "1MB"}
    plan = onnxpar.plan(step, **limit, place=["w=host"])
    assert plan.on_host is not None and sum(plan.memory.values()) < 1e6
    with pytest.raises(StrategyError, match="a rank would need 24"):
        onnxpar.plan(step, **limit)
    both = [onnxpar.plan(step, mesh="dp=1", place=place) for place in ([], ["w=host"])]
    seconds = [one.predicted.compute for one in both if one.predicted]
    assert seconds[1] < seconds[0] / 10


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[ThreadTrainer]:
    par, _ = shard(step_of(tmp_path), "tp=3", strategy={**BY_ROWS, **HOST})
    with ThreadTrainer(par) as trainer:
        yield trainer


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_a_run_that_fails_on_one_rank_changes_no_row(trainer: ThreadTrainer) -> None:
    feeds = list(fed_to_model(2))
    trainer.step(feeds[0], 0.05)
    before = states(trainer)
    wrong = {**feeds[1], "ids": np.full_like(feeds[1]["ids"], 40)}
    with pytest.raises(Exception, match="40"):
        trainer.step(wrong, 0.05)
    same(states(trainer), before)
    executors: Any = trainer.session._ranks
    run = executors._executors[0].run

    def failing(*given: Any) -> Any:
        run(*given)
        raise RuntimeError("after its run")

    executors._executors[0].run = failing
    with pytest.raises(RunError, match="after its run"):
        trainer.step(feeds[1], 0.05)
    same(states(trainer), before)
    executors._executors[0].run = run
    trainer.step(feeds[1], 0.05)
    assert (trainer.session.states.read("w") != before["w"]).any()


def fed_to_model(count: int) -> Iterator[dict[str, Array]]:
    draw = np.random.default_rng(5)
    for _ in range(count):
        yield {
            "ids": rows(draw, (5, 2)),
            "more": rows(draw, (5, 3)),
            "target": draw.standard_normal((5, 4)).astype(np.float32),
        }


@pytest.mark.slow
def test_states_are_read_written_fed_and_fetched_whole(
    trainer: ThreadTrainer, tmp_path: Path
) -> None:
    session = trainer.session
    (feeds,) = fed_to_model(1)
    given = {**feeds, "learning_rate": np.array(0.05, np.float32)}
    given["samples"] = np.array(5, np.float32)
    names = ["w.next", "w.exp_avg.next", "loss"]
    reference = ort.InferenceSession(tmp_path / "step.onnx")
    zeros = {p.name: np.zeros(p.shape, np.int64 if p.name == "step" else np.float32)
             for p in reference.get_inputs() if p.name not in given}  # fmt: skip
    wanted = reference.run(names, {**given, **zeros})
    for kept in (False, True):  # without keep_states, nothing changes
        found = session.run(names, given, keep_states=kept)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(session.states.read("w"), found[0])
    table = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
    wanted = reference.run(names, {**given, **zeros, "w": table})
    session.states.reset()
    found = session.run(names, {**given, "w": table}, keep_states=True)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(session.states.read("w"), found[0])
    session.states.write("w", table)
    np.testing.assert_array_equal(session.states.read("w"), table)
    assert session.states.on_host == ["w", "w.exp_avg", "w.exp_avg_sq"]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("first", LAYOUTS)
def test_resume_in_any_layout(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without files, over other ranks; blocks are smaller than tables."""
    monkeypatch.setattr("onnxpar.runtime.states.host_table.BLOCK", 100)
    step = step_of(tmp_path)
    mesh, how = LAYOUTS[first]
    par, plan = shard(step, mesh, strategy={**how, **HOST})
    before, after = (list(feeds_of(plan, 4))[i : i + 2] for i in (0, 2))
    with ThreadTrainer(par) as trainer:
        for batch in before:
            trainer.step(batch, 0.05)
        trainer.save(tmp_path / "c", Progress(2))
        saved = states(trainer)
        for batch in after:
            trainer.step(batch, 0.05)
        left = states(trainer)
    with contextlib.suppress(FileExistsError):
        (tmp_path / "again").mkdir()
    for number, (mesh, how) in enumerate(LAYOUTS.values()):
        place = HOST if number % 4 else {}
        other, _ = shard(step, mesh, strategy={**how, **place})
        with ThreadTrainer(other) as trainer:
            assert trainer.load(tmp_path / "c").progress.step == 2
            same(states(trainer), saved)
            for batch in after:
                trainer.step(batch, 0.05)
            for name, value in states(trainer).items():
                np.testing.assert_allclose(value, left[name], rtol=2e-4, atol=2e-6, err_msg=name)


TEXT = """lookup (int64[8,3] ids, float[8,6] x) => (float[8,6] y)
<float[20,6] w, float[6,6] v, float[20,6] u>
{ e = Gather(w, ids)  axes = Constant<value_ints = [1]>()  s = ReduceSum<keepdims = 0>(e, axes)
  h = MatMul(x, v)  z = Add(s, h)  y = Sum(z, h) }"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"place": {"w2": "host"}}, "each step changes all its rows; write the step with"),
        ({"place": {"v*": "host"}}, "'v[*]' matches no table; there are 'w.exp_avg'"),
        ({"place": {"w": "disk"}}, "place w=disk: give host, or leave it out"),
        ({"place": ["w"]}, "place must be a mapping"),
        ({"shard": {"w2": {"primitive_target": "CPU"}}}, "is for a Gather that looks up rows"),
    ],
)
def test_errors(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message):
        plan_of(step_of(tmp_path), "tp=2", strategy=given)


def test_a_table_that_is_trained_whole_stays_in_memory(tmp_path: Path) -> None:
    step = write_step(MODEL.replace("BATCH", "5"), tmp_path, "mse", "adam")
    for given in (HOST, {"shard": {"w": {"primitive_target": "CPU"}}}):
        with pytest.raises(StrategyError, match=r"w: each step changes all its rows.*--lazy 'w'"):
            plan_of(step, "tp=2", strategy=given)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_does_not_exchange_tables_on_the_host(stage: int, tmp_path: Path) -> None:
    """They are whole on every rank; other weights and their states are split as without them."""
    placed, memory = (
        plan_of(step_of(tmp_path), f"zero{stage} 2", strategy=place) for place in (HOST, {})
    )
    layouts = [
        {p.name: p.layout.text(plan.mesh) if p.layout else "" for p in plan.inputs}
        for plan in (placed, memory)
    ]
    for name, layout in layouts[0].items():
        is_table = name.partition(".")[0] == "w"
        assert layout == ("[-, -]" if is_table else layouts[1][name]), name
    assert not any(c.bytes > 40 * 6 * 3 for c in placed.collectives)
    rows = 5 * (2 + 3) * 6 * 4  # the gradients of all lookups
    (found,) = [c.bytes for c in placed.collectives if c.bytes >= rows]
    assert found - rows in (0, 4)  # and the sum of the loss


def test_a_strategy_that_splits_the_state_alone(tmp_path: Path) -> None:
    """Then ranks would exchange the whole table after each step."""
    state = {"tensors": {"w": [None, None], "w.exp_avg": [None, "tp"]}}
    with pytest.raises(StrategyError, match="exchanges the whole table after each step; split"):
        plan_of(step_of(tmp_path), "tp=2", strategy={**state, **HOST})


@pytest.mark.parametrize(
    "given",
    [
        {"place": {"w": "host"}},
        {"shard": {"w": {"primitive_target": "CPU"}}},
        {"shard": {"*lookup*": {"primitive_target": "host"}}},
    ],
)
def test_weights_of_inference(given: dict[str, Any], tmp_path: Path) -> None:
    """Stay in their mapped files in any case; the plan counts them apart."""
    values = ", ".join(map(str, range(120)))
    text = f"""lookup (int64[8,3] ids) => (float[8,3,6] y) <float[20,6] w = {{{values}}}>
    {{ [lookup] y = Gather(w, ids) }}"""
    model = write_text(HEAD + text, tmp_path / "m.onnx")
    plan = onnxpar.shard(
        model, tmp_path / "m.par", mesh="tp=2", strategy={**given, "tensors": {"w": ["tp", None]}}
    )
    assert plan.on_host is not None and plan.on_host.tensors == ["w"]
    assert plan.memory["weights_per_rank"] == 0 and plan.on_host.bytes_per_rank == 240
    lines = list(plan_lines(plan.to_json()))
    assert "on the host: 1 tensor in files, at most 240 B per rank" in lines
    ids = np.arange(24).reshape(8, 3) % 20
    with onnxpar.InferenceSession(tmp_path / "m.par") as session:
        (y,) = session.run(None, {"ids": ids})
    np.testing.assert_array_equal(y, np.arange(120, dtype=np.float32).reshape(20, 6)[ids])


def test_the_command_and_the_call(tmp_path: Path) -> None:
    step = step_of(tmp_path)
    for place in ({"w": "host"}, ["w=host"]):
        plan = onnxpar.plan(step, devices=2, preset="table-parallel", place=place)
        assert plan.on_host is not None
    with pytest.raises(StrategyError, match="--place w: write TABLE=host"):
        onnxpar.plan(step, devices=2, place=["w"])
