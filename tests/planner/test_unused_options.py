"""Options that nothing would look at are errors that name them, not ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_models import HEAD, write_text
from training.steps import MLP, write_step

from onnxpar.api import make_plan
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main

MANUAL = """m (float[4,6] x) => (float[4,6] y)
{ y = onnxpar.AllReduce<axes = ["dp"]>(x) }"""


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    head = HEAD.replace("]>", ', "onnxpar" : 1]>')
    return write_text(head + MANUAL, tmp_path / "manual.onnx")


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return write_step(MLP, tmp_path)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("onnxpar: error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "option",
    [
        ["--fusion", "size"],
        ["--fusion", "none"],
        ["--bucket-mb", "1"],
        ["--compression", "float16"],
        ["--search", "auto"],
        ["--objective", "throughput"],
        ["--memory-limit", "1GB"],
        ["--untied"],
        ["--configuration", "none"],
        ["--strict"],
    ],
)
def test_a_manual_program_has_no_use_for(
    option: list[str], manual: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(manual), "--mesh", "dp=2", "--preset", "manual"]
    assert main(arguments) == 0
    capsys.readouterr()
    told = refused([*arguments, *option], capsys)
    assert option[0] in told
    if option[0] in ("--fusion", "--bucket-mb"):
        assert "Concat their inputs" in told and "zero1" in told


@pytest.mark.parametrize("option", [["--objective", "throughput"], ["--untied"]])
@pytest.mark.parametrize(
    "how", [["--preset", "data-parallel"], ["--search", "propagation"], ["--preset", "hybrid"]]
)
def test_what_is_of_the_search_needs_one(
    how: list[str], option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_text(HEAD + "m (float[4] x) => (float[4] y) { y = Relu(x) }", tmp_path / "m.onnx")
    arguments = ["plan", str(model), "--mesh", "dp=2", *option]
    assert main(arguments) == 0
    capsys.readouterr()
    assert f"{option[0]} applies to the search" in refused([*arguments, *how], capsys)
    with pytest.raises(StrategyError, match="--untied applies to the search"):
        make_plan(model, devices=2, preset="data-parallel", untied=True)


def test_candidates_take_the_objective_with_every_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "m (float[4,6] x, float[6,4] w) => (float[4,4] y) { y = MatMul(x, w) }"
    model = write_text(HEAD + text, tmp_path / "m.onnx")
    arguments = ["plan", str(model), "--devices", "2", "--candidates"]
    assert main([*arguments, "--objective", "throughput"]) == 0
    assert "data-parallel" in capsys.readouterr().out


def test_a_bucket_needs_fusion(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(step), "--devices", "2", "--preset", "data-parallel"]
    for given in ([], ["--fusion", "size"], ["--fusion", "cost"]):
        assert main([*arguments, "--bucket-mb", "1", *given]) == 0
    capsys.readouterr()
    assert "--fusion size" in refused([*arguments, "--bucket-mb", "1", "--fusion", "none"], capsys)


def test_the_loss_of_an_output_that_is_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """m (float[4,6] x, float[6] w) => (float l, float[4] y)
    { y = MatMul(x, w)  l = ReduceMean<keepdims = 0>(y) }"""
    model = write_text(HEAD + text, tmp_path / "m.onnx")
    arguments = ["grad", str(model), "--loss", "l", "--optimizer", "sgd"]
    arguments += ["-o", str(tmp_path / "step.onnx")]
    assert main(arguments) == 0
    capsys.readouterr()
    for option in (["--loss-of", "y"], ["--class-axis", "1"]):
        assert option[0] in refused([*arguments, *option], capsys)


@pytest.mark.parametrize("option", [["--steps", "3"], ["--lr", "0.1"]])
def test_options_of_a_check_of_training(
    option: list[str], step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", str(step), "--devices", "2", *option]
    assert f"{option[0]} {option[1]}: applies to --train only" in refused(arguments, capsys)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "option",
    [
        ["--devices", "4"],
        ["--mesh", "tp=4"],
        ["--preset", "data-parallel"],
        ["--search", "auto"],
        ["--dataset-strategy", "full_batch"],
        ["--configuration", "none"],
        ["--objective", "throughput"],
        ["--memory-limit", "1GB"],
        ["--untied"],
        ["--dim", "batch=3"],
        ["--typical", "batch=3"],
        ["--state", "x=y"],
        ["--only-given-states"],
        ["--strict"],
    ],
)
def test_a_dump_has_its_layouts(
    option: list[str], step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump, how = tmp_path / "dump", ["--devices", "2", "--preset", "data-parallel"]
    passes = ["--passes", "propagate-layouts"]
    assert main(["opt", str(step), *how, *passes, "--dump", str(dump)]) == 0
    capsys.readouterr()
    later = ["opt", str(dump / "02-propagate-layouts.onnx"), "--passes", "insert-collectives"]
    told = refused([*later, *option], capsys)
    assert f"{option[0]}: " in told and "was dumped for the mesh dp=2" in told
    assert main([*later, "--devices", "2"]) == 0


@pytest.mark.parametrize("option", [["--memory-limit", "3B"], ["--strict"]])
def test_single_passes_make_no_plan(
    option: list[str], step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["opt", str(step), "--devices", "2", "--preset", "data-parallel"]
    arguments += ["--passes", "propagate-layouts"]
    assert f"{option[0]}: opt runs single passes" in refused([*arguments, *option], capsys)
