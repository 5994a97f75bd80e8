"""What commands print: the options --quiet, --verbose and --json, and Python's logging."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import numpy as np
import pytest

import onnxpar
from onnxpar.cli import command_line
from onnxpar.cli.command_line import main
from onnxpar.cost.topology import Topology
from onnxpar.planner import calibrate

MODELS = Path(__file__).parents[2] / "models"
GPT2 = str(MODELS / "gpt2.dynamo.static.onnx")
OPEN = str(MODELS / "bert.dynamo.dynamic.onnx")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert main([*arguments]) == 0
    found = capsys.readouterr()
    return found.out, found.err


def test_a_quiet_command_whose_result_is_a_file_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    par = str(tmp_path / "m.par")
    loud, _ = said(capsys, "shard", GPT2, "--devices", "2", "-o", par)
    assert "written to" in loud
    assert said(capsys, "shard", GPT2, "--devices", "2", "-o", par, "-q") == ("", "")
    assert said(capsys, "plan", GPT2, "--devices", "2", "-q")[0].startswith("gpt2")
    assert main(["plan", GPT2, "-q"]) == 2
    assert "error: " in capsys.readouterr().err


def test_quiet_commands_do_not_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here of the running variances of BatchNormalization, in the words of the command."""
    model, step = str(MODELS / "resnet.legacy.training.onnx"), str(tmp_path / "step.onnx")
    grad = ["grad", model, "--loss", "softmax-cross-entropy", "--optimizer", "sgd", "-o", step]
    assert "warning: /network/resnet" in said(capsys, *grad)[1]
    with warnings.catch_warnings(record=True) as found:
        assert said(capsys, *grad, "-q") == ("", "")
    assert not found


def test_a_verbose_command_tells_passes_and_why_it_plans_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ring = ["plan", OPEN, "--mesh", "cp=3", "--preset", "ring-attention"]
    told = said(capsys, *ring, "-v")[1].splitlines()
    assert all(line.startswith("onnxpar: ") for line in told)
    assert "onnxpar: pass localize-ops: " in "\n".join(told)
    assert any(line.startswith("onnxpar: planning again, with ") for line in told)
    assert said(capsys, *ring)[1] == ""


def test_a_program_gets_messages_from_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "onnxpar"):
        onnxpar.plan(GPT2, devices=2)
    told = [record.getMessage() for record in caplog.records if record.name == "onnxpar"]
    assert "search: analysing the model" in told
    assert any(text.startswith("pass propagate-layouts: ") for text in told)


def test_a_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    check = ["check", GPT2, "--devices", "2", "--preset", "tensor-parallel", "--json"]
    told = json.loads(said(capsys, *check)[0])
    (output,) = told["outputs"]
    assert told["ok"] is output["ok"] is True
    assert (output["name"], output["dtype"]) == ("logits", "float32")
    assert 0 <= output["error"] <= output["tolerance"]
    assert told["times"]["predicted"][1] == pytest.approx(told["plan"]["predicted"]["total"])
    assert told["plan"]["ranks"] == told["times"]["ranks"] == 2


@pytest.mark.parametrize("json_too", [False, True])
def test_training_as_json(
    json_too: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each step, with what the file of metrics has."""
    model, step = str(MODELS / "gpt2.legacy.training.onnx"), str(tmp_path / "step.onnx")
    par, data, logs = (str(tmp_path / name) for name in ("s.par", "d.npz", "log"))
    ids = np.random.default_rng(0).integers(0, 48, (16, 16))
    np.savez(data, input_ids=ids, attention_mask=np.ones_like(ids), labels=ids)
    loss = ["--loss", "softmax-cross-entropy", "--optimizer", "sgd"]
    said(capsys, "grad", model, *loss, "-o", step, "-q")
    said(capsys, "shard", step, "--devices", "2", "--preset", "data-parallel", "-o", par, "-q")
    train = ["train", par, "--data", data, "--epochs", "2", "--lr", "0.1", "--log-dir", logs]
    if not json_too:
        assert said(capsys, *train, "-q") == ("", "")
    else:
        out = said(capsys, *train, "--json")[0]
        assert out == Path(logs, "metrics.jsonl").read_text()
    again = [*train, "--checkpoint", str(tmp_path / "run"), "--resume"]
    said(capsys, *again, "-q")
    assert "warning: nothing to do" in said(capsys, *again)[1]
    assert said(capsys, *again, "-q") == ("", "")
    rows = [json.loads(line) for line in Path(logs, "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and rows


def test_each_command_whose_result_is_a_file_can_be_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands are known by the words that a user writes, not by names in the code."""
    for words in command_line._WRITERS:
        with pytest.raises(SystemExit, match="0"):
            main([*words.split(), "--help"])
        assert f"usage: onnxpar {words} " in capsys.readouterr().out
    found = Topology.from_argument("2-core")
    monkeypatch.setattr(calibrate, "_calibrate", lambda *given: ([], found))
    monkeypatch.setattr(calibrate, "lines", lambda *given: ["measured"])
    arguments = ["calibrate", "-o", str(tmp_path / "t.yaml")]
    assert "measured" in said(capsys, *arguments)[0]
    assert said(capsys, *arguments, "-q") == ("", "")
    told = json.loads(said(capsys, *arguments, "-q", "--json")[0])
    assert Topology.of(told) == found


def test_times_are_predicted_for_the_sizes_that_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of given inputs, too: the plan says nothing of a batch of 8."""
    feeds = {
        name: np.ones((8, 6), np.int64)
        for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    np.savez(tmp_path / "8.npz", **feeds)
    check = ["check", OPEN, "--devices", "2", "--preset", "data-parallel", "--typical"]
    given = ["--inputs", str(tmp_path / "8.npz")]
    assert "predicted)" in said(capsys, *check, "batch=8,seq=6", *given)[0]
    assert "predicted)" not in said(capsys, *check, "batch=2,seq=6", *given)[0]
    assert "predicted)" in said(capsys, *check, "batch=2,seq=6")[0]
