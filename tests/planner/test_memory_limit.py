"""No rank holds more than it may, or the user is told what would help."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from agreement import check_agrees
from bench import llama_shape
from committed import MODELS
from onnx import helper
from tiny_models import W, model, port, write

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.context import load_model, make_context
from onnxpar.planner.options import Options
from onnxpar.search.enough_devices import enough_devices
from onnxpar.search.objective import Objective
from onnxpar.search.patience import Patience
from onnxpar.search.search import solve
from onnxpar.training import grad

GPT2 = MODELS / "gpt2.dynamo.static.onnx"
KB = 1000.0
TINY = model(
    [helper.make_node("MatMul", ["x", "w"], ["y"], "mm")],
    [port("x", [6, 4])],
    [port("y", [6, 6])],
    {"w": W},
)


def limited(memory: float, **more: object) -> Options:
    return Options(objective=Objective(memory=memory), check_layouts=True, **more)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("limit", [400 * KB, 200 * KB, 175 * KB])
def test_ranks_hold_no_more(limit: float, tmp_path: Path) -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    how = limited(limit, mesh=mesh)
    made, _ = sharder.plan(GPT2, how)
    free, _ = sharder.plan(GPT2, Options(mesh=mesh, search="auto"))
    assert sum(made.memory.values()) <= limit < sum(free.memory.values())
    check_agrees(GPT2, tmp_path, how)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", ["bert.legacy.static.onnx", "resnet.dynamo.static.onnx", "dlrm.dynamo.static.onnx"]
)
def test_of_other_models(name: str, tmp_path: Path) -> None:
    mesh, path = Mesh.parse("tp=4"), MODELS / name
    free, _ = sharder.plan(path, Options(mesh=mesh, search="auto"))
    limit = 0.6 * sum(free.memory.values())
    made, _ = sharder.plan(path, limited(limit, mesh=mesh))
    assert sum(made.memory.values()) <= limit
    check_agrees(path, tmp_path, limited(limit, mesh=mesh))


@pytest.mark.slow
def test_annotations_keep_to_it(tmp_path: Path) -> None:
    how = limited(200 * KB, mesh=Mesh.parse("tp=4"))
    made = sharder.annotate(GPT2, tmp_path / "m.onnx", how)
    assert sum(made.memory.values()) <= 200 * KB
    again, _ = sharder.plan(tmp_path / "m.onnx", Options(devices=4))
    assert again.memory == made.memory


@pytest.mark.slow
def test_the_fewest_ranks_that_do() -> None:
    with pytest.raises(StrategyError, match=r"over tp=2, .*, or give --devices 3, the fewest"):
        sharder.plan(GPT2, limited(250 * KB, devices=2))
    made, _ = sharder.plan(GPT2, limited(250 * KB, devices=3))
    assert sum(made.memory.values()) <= 250 * KB


def test_a_mesh_that_is_given_does_not_grow() -> None:
    with pytest.raises(StrategyError, match="a mesh of more ranks"):
        sharder.plan(GPT2, limited(50 * KB, mesh=Mesh.parse("tp=2")))


@pytest.mark.slow
def test_untied_layers_need_not_all_pay(tmp_path: Path) -> None:
    path = tmp_path / "llama.onnx"
    llama_shape.write(path, layers=4, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=128)
    how = Options(mesh=Mesh.parse("tp=2"))
    loaded = load_model(path, how)
    sharding = make_context(loaded, how).sharding
    tied, untied = (
        solve(
            loaded.graph,
            sharding,
            loaded.states,
            objective=Objective(memory=612 * KB, untied=is_untied),
        )
        for is_untied in (False, True)
    )
    assert untied.seconds < 0.95 * tied.seconds


def test_a_preset_that_holds_more_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"data-parallel over dp=2: a rank would need .* auto"):
        sharder.plan(GPT2, limited(250 * KB, devices=2, preset="data-parallel"))


def test_what_no_number_of_ranks_can_do(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="up to 32 ranks were tried and do not suffice"):
        sharder.plan(write(TINY, tmp_path), limited(64.0, devices=2))


@pytest.mark.slow
def test_the_solver_prints_nothing(tmp_path: Path) -> None:
    """Native code, which writes to the process's own stdout."""
    machine = tmp_path / "machine.yaml"
    host = {"name": "host", "size": 4, "latency": 1e-7, "bandwidth": 1e10}
    rack = {"name": "rack", "latency": 1e-6, "bandwidth": 1e9}
    device = {"flops": 1e9, "memory_bandwidth": 1e9, "launch": 1e-8}
    machine.write_text(json.dumps({"levels": [host, rack], "device": device}))
    how = ["--mesh", "tp=8", "--objective", "throughput", "--memory-limit", "60kB", "--json"]
    args = ["plan", str(MODELS / "dlrm.legacy.static.onnx"), "--topology", str(machine), *how]
    command = [sys.executable, "-m", "onnxpar", *args]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["mesh"] == [["tp", 8]]


@pytest.mark.parametrize(("needed", "first"), [(3, 3), (7, 3), (40, 3), (1000, 9), (4096, 2)])
def test_enough_devices(needed: int, first: int) -> None:
    assert enough_devices(lambda n: n >= needed, first, 4096) == needed


def test_never_enough_devices() -> None:
    assert enough_devices(lambda n: False, 3, 100) is None


@pytest.mark.parametrize("size", ["16 horses", "0", "16"])
def test_what_is_no_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(GPT2), "--devices", "2", "--memory-limit", size]) == 2
    assert "--memory-limit" in capsys.readouterr().err


def test_a_size_needs_a_unit() -> None:
    """16 would be 16 bytes, which nobody means."""
    with pytest.raises(StrategyError, match="--memory-limit 16: give a unit: 16GB or 16B"):
        Objective.from_argument(None, "16")
    assert (
        Objective.from_argument(None, "16GB").memory == 16e9
        and Objective.from_argument(None, 16).memory == 16.0
    )


@pytest.mark.slow
def test_what_no_ranks_can_hold_is_answered_in_time_and_with_a_bound(tmp_path: Path) -> None:
    """Which strategies hold little is known by then, whatever number of ranks was tried."""
    told: list[str] = []
    patience = Patience(tell=told.append)
    path, how = MODELS / "gpt2.dynamo.static.onnx", Objective(memory=20 * KB, patience=patience)
    least = r"\(with any strategy, it would need at least ([\d.]+) kB\)"
    pattern = rf"would need ([\d.]+) kB, more .* {least}"
    with pytest.raises(StrategyError, match=pattern) as caught:
        sharder.plan(path, Options(devices=2, objective=how))
    found = re.search(pattern, str(caught.value))
    assert found and 20 < float(found[2]) <= float(found[1]) <= 1.05 * float(found[2])
    assert "mesh tp=2" in told and "64 ranks" not in told and told[-1] == ""


@pytest.mark.slow
def test_the_best_in_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without patience, something that fits counts, and the plan says so."""
    patience = Patience(0.0)
    monkeypatch.setattr(Patience, "renewed", lambda self, seconds=0.0: self)
    made, _ = sharder.plan(
        GPT2, Options(devices=4, objective=Objective(memory=250 * KB, patience=patience))
    )
    assert sum(made.memory.values()) <= 250 * KB
    assert any("stopped after 0 s" in note for note in made.notes)


@pytest.mark.slow
def test_a_step_has_no_throughput() -> None:
    path = MODELS / "bert.legacy.training.onnx"
    made, _ = sharder.plan(path, Options(devices=2, objective=Objective("throughput")))
    assert made.step is None
    with pytest.raises(StrategyError, match="objective"):
        sharder.plan(path, Options(devices=2, objective=Objective("fastest")))


@pytest.mark.slow
def test_weights_that_stay_on_every_rank_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """And what splits them; of a plan that splits them, nothing is said."""
    how = ["plan", str(GPT2), "--devices", "4"]
    assert main(how) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "note: every rank holds all weights" in out
    assert "--memory-limit SIZE" in out and "--preset tensor-parallel" in out
    for split in (["--memory-limit", "250kB"], ["--preset", "tensor-parallel"]):
        assert main([*how, *split]) == 0
        assert "every rank holds" not in capsys.readouterr().out


@pytest.mark.slow
def test_parameters_of_a_step_that_stay_on_every_rank(tmp_path: Path) -> None:
    """Its constants, such as masks, do not count."""
    step = tmp_path / "step.onnx"
    grad(
        MODELS / "gpt2.legacy.training.onnx", step, loss="softmax-cross-entropy", optimizer="adamw"
    )
    for preset, is_noted in (("data-parallel", True), ("zero1", False), ("tensor-parallel", False)):
        notes = onnxpar.plan(step, devices=2, preset=preset).notes
        told = [note for note in notes if note.startswith("every rank holds")]
        assert len(told) == is_noted, preset
        assert all("parameters and optimizer states, 716.5" in note for note in told)
