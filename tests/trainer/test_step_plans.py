"""A training step that is sharded again for fewer ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from training.steps import DOUBLE, MLP, write_step

import onnxpar
from onnxpar.base.errors import InputError, ModelError, StrategyError
from onnxpar.cli.command_line import main
from onnxpar.layout.mesh import Mesh
from onnxpar.planner.request import requests_for
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.strategy.strategy import Strategy
from onnxpar.trainer.step_plans import StepPlans


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return write_step(MLP, tmp_path, optimizer="adam", clip_norm=1.0)


def made(step: Path, **options: Any) -> Path:
    par = step.with_name("step.par")
    onnxpar.shard(step, par, **options)
    return par


def request(par: Path) -> Any:
    return json.loads((par / "plan.json").read_text())["request"]


def collectives(par: Path) -> list[Any]:
    return list(Bundle.load(par).data["collectives"])


def test_the_request_is_in_the_plan(step: Path, tmp_path: Path) -> None:
    """With what is in files, and as the command gives it."""
    (tmp_path / "s.yaml").write_text("mesh: {dp: 2}\ntensors: {x: [dp, null]}\n")
    options = {"strategy": str(tmp_path / "s.yaml"), "fusion": "size", "bucket_mb": 1}
    found = request(made(step, **options))
    inlined = {"mesh": {"dp": 2}, "tensors": {"x": ["dp", None]}}
    wanted = {"strategy": inlined, "fusion": "size", "bucket_mb": 1}
    assert found["options"] == wanted and found["file"] == "step.onnx"
    flags = ["--strategy", options["strategy"], "--fusion", "size", "--bucket-mb", "1"]
    assert main(["shard", str(step), *flags, "-o", str(tmp_path / "c.par")]) == 0
    again = request(tmp_path / "c.par")
    assert again["sha256"] == found["sha256"]
    assert StepPlans(tmp_path / "c.par", tmp_path).at_most(1, 1) == tmp_path / "ranks_0001.par"


def test_a_model_that_is_no_step_has_none(step: Path, tmp_path: Path) -> None:
    par = tmp_path / "model.par"
    onnxpar.shard(tmp_path / "model.onnx", par, devices=2)
    assert request(par) is None


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero2", "tensor-parallel"])
def test_it_is_the_plan_that_the_user_would_make(preset: str, step: Path, tmp_path: Path) -> None:
    par = made(step, devices=4, preset=preset)
    told: list[str] = []
    found = StepPlans(par, tmp_path / "run", tell=told.append).at_most(3, 1)
    onnxpar.shard(step, tmp_path / "hand.par", devices=3, preset=preset)
    assert Bundle.load(found).mesh == Bundle.load(tmp_path / "hand.par").mesh
    assert collectives(found) == collectives(tmp_path / "hand.par")
    assert told == [f"sharding {step} for 3 ranks"]


def test_the_same_number_of_ranks_needs_no_other_folder(step: Path, tmp_path: Path) -> None:
    par = made(step, devices=2, preset="zero2")
    assert StepPlans(par, tmp_path).at_most(2, 1) == par


@pytest.mark.slow
def test_a_folder_that_is_there_is_taken_if_it_is_the_same_step(step: Path, tmp_path: Path) -> None:
    par = made(step, devices=3, preset="zero2")
    told: list[str] = []
    plans = StepPlans(par, tmp_path / "run", tell=told.append)
    first = plans.at_most(2, 1)
    assert plans.at_most(2, 1) == first and len(told) == 1
    (first / "rank_0001.onnx").unlink()
    assert plans.at_most(2, 1) == first and len(told) == 2
    other = made(write_step(DOUBLE, tmp_path), devices=3, preset="zero2")
    assert StepPlans(other, tmp_path / "run", tell=told.append).at_most(2, 1) == first
    assert len(told) == 3 and Bundle.load(first).inputs["x"].dtype == "float64"


ALIKE: Mapping[tuple[str, int], list[str]] = {
    ("dp=2,tp=2", 3): ["dp=1,tp=3", "dp=3,tp=1"],
    ("dp=2,tp=2", 2): ["dp=1,tp=2", "dp=2,tp=1"],
    ("dp=4,tp=2", 6): ["dp=3,tp=2", "dp=2,tp=3", "dp=1,tp=6", "dp=6,tp=1"],
    ("pp=2,dp=2,tp=2", 4): ["pp=1,dp=2,tp=2", "pp=2,dp=1,tp=2"],
}


@pytest.mark.parametrize(("mesh", "ranks"), ALIKE)
def test_meshes_that_are_most_alike_come_first(mesh: str, ranks: int) -> None:
    """Inner axes keep their sizes, or grow."""
    found = requests_for({"mesh": mesh, "preset": "hybrid"}, Mesh.parse(mesh), ranks)
    wanted = ALIKE[mesh, ranks]
    assert [each["mesh"] for each in found][: len(wanted)] == wanted


def test_a_mesh_in_a_strategy_gives_way() -> None:
    strategy = {"mesh": {"dp": 2}, "tensors": {"x": ["dp", None]}}
    (found,) = requests_for({"strategy": strategy}, Mesh.parse("dp=2"), 3)
    assert found == {"strategy": {"tensors": strategy["tensors"]}, "mesh": "dp=3"}
    (found,) = requests_for({"devices": 4, "preset": "zero3"}, Mesh.parse("dp=4"), 3)
    assert found == {"preset": "zero3", "devices": 3}


@pytest.mark.slow
def test_numbers_of_ranks_without_a_plan_are_left_out(step: Path, tmp_path: Path) -> None:
    """Halves can be had over 4 ranks and over 2, but not over 3."""
    halves = {"shard": {"Gemm_h": [[2, 1], [1, 1], [1]]}}
    par = made(step, devices=4, strategy=halves)
    told: list[str] = []
    plans = StepPlans(par, tmp_path / "run", tell=told.append)
    assert Bundle.load(plans.at_most(3, 1)).mesh.size == 2
    assert any(line.startswith(f"{step} has no plan for 3 ranks: ") for line in told)
    with pytest.raises(StrategyError, match=r"has no plan for 3 to 3 ranks, by the request of"):
        plans.at_most(3, 3)


@pytest.mark.slow
def test_a_topology_of_fewer_ranks_gives_way(step: Path, tmp_path: Path) -> None:
    host = {"name": "host", "size": 2, "bandwidth": "10GB/s", "latency": "5us"}
    levels = [host, {**host, "name": "network"}]
    par = made(step, devices=4, preset="zero2", topology={"levels": levels})
    assert Bundle.load(StepPlans(par, tmp_path / "run").at_most(5, 1)).mesh.size == 5


@pytest.mark.slow
def test_a_step_that_cannot_be_sharded_again(step: Path, tmp_path: Path) -> None:
    par = made(step, devices=2, strategy=Strategy.of({}))
    with pytest.raises(InputError, match=r"step\.par does not say how it was made, so that it"):
        StepPlans(par, tmp_path)
    par = made(step, devices=2, preset="zero2")
    moved = step.rename(tmp_path / "moved.onnx")
    with pytest.raises(InputError, match=r"step\.onnx is not there, of which .*; give it with --s"):
        StepPlans(par, tmp_path)
    assert StepPlans(par, tmp_path, moved).at_most(1, 1) == tmp_path / "ranks_0001.par"
    plans = StepPlans(par, tmp_path / "others", moved)
    write_step(DOUBLE, tmp_path).rename(moved)
    with pytest.raises(ModelError, match=r"moved\.onnx is not the model of which .*, or has chan"):
        StepPlans(par, tmp_path, moved)
    with pytest.raises(ModelError, match=r"moved\.onnx is not the model"):
        plans.at_most(1, 1)


def test_weights_in_another_file_count(step: Path, tmp_path: Path) -> None:
    import onnx

    folder = tmp_path / "apart"
    folder.mkdir()
    onnx.save(
        onnx.load(step),
        folder / "step.onnx",
        save_as_external_data=True,
        location="weights",
        size_threshold=100,
    )
    par = made(folder / "step.onnx", devices=2, preset="zero2")
    StepPlans(par, tmp_path)
    with (folder / "weights").open("r+b") as file:
        file.write(b"other")
    with pytest.raises(ModelError, match="or has changed since"):
        StepPlans(par, tmp_path)
