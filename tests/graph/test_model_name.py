"""What a model is called where its file is called what all are called."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from small_models import HEAD, write_text

import onnxpar
from onnxpar.cli.command_line import main
from onnxpar.graph.model_name import model_name

REVISION = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
TEXT = "m (float[8,16] x) => (float[8,16] y) { a = Relu(x) y = Neg(a) }"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("gpt2.onnx", "gpt2.onnx"),
        ("models/gpt2.onnx", "gpt2.onnx"),
        ("models/gpt2/model.onnx", "gpt2"),
        ("/gpt2/onnx/model.onnx", "gpt2"),
        (f"/hub/models--gpt2/snapshots/{REVISION}/onnx/model.onnx", "models--gpt2"),
        ("gpt2/onnx/model_fp16.onnx", "model_fp16.onnx"),
        ("gpt2/other/../model.onnx", "gpt2"),
        ("/model.onnx", "model.onnx"),
        ("/onnx/model.onnx", "model.onnx"),
    ],
)
def test_names(path: str, name: str) -> None:
    assert model_name(Path(path)) == name


def test_in_the_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path / "gpt2")
    assert model_name(Path("model.onnx")) == "gpt2"


def test_everywhere_a_plan_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny").mkdir()
    model, html = write_text(HEAD + TEXT, tmp_path / "tiny" / "model.onnx"), tmp_path / "r.html"
    strategy, out = tmp_path / "s.yaml", tmp_path / "tiny.par"
    how = ["plan", str(model), "--devices", "2"]
    assert main([*how, "--html", str(html)]) == 0
    assert capsys.readouterr().out.startswith("tiny over 2 ranks (")
    assert "<h1>tiny</h1>" in html.read_text()
    assert "<title>tiny over 2 ranks</title>" in html.read_text()
    assert main([*how, "--save-strategy", str(strategy)]) == 0
    capsys.readouterr()
    assert strategy.read_text().startswith("# tiny over 2 ranks")
    assert main([*how, "--candidates"]) == 0
    assert capsys.readouterr().out.startswith("tiny over 2 ranks, ")
    assert main(["shard", str(model), "--devices", "2", "-o", str(out)]) == 0
    assert json.loads((out / "plan.json").read_text())["model"] == "tiny"


@pytest.mark.parametrize(("graph", "name"), [("gpt", "gpt.onnx"), ("model", "unnamed.onnx")])
def test_in_memory(graph: str, name: str) -> None:
    model = onnx.parser.parse_model(HEAD + TEXT)
    model.graph.name = graph
    assert onnxpar.plan(model, devices=2).model == name
