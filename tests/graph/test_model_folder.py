"""Which file of a folder is the model, and which files go with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from committed import MODELS

from onnxpar.base.errors import ModelError
from onnxpar.cli import main
from onnxpar.graph.model_folder import CARRIED, carried_files, decoder_in, model_at

LLAMA = MODELS / "llm" / "llama"


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


@pytest.mark.parametrize(
    "names,wanted",
    [
        (["model.onnx", "config.json"], "model.onnx"),
        (["onnx/model.onnx", "onnx/model_int8.onnx", "config.json"], "onnx/model.onnx"),
        (["encoder_model.onnx", "decoder_model_merged.onnx"], "decoder_model_merged.onnx"),
        (["decoder_model.onnx", "decoder_with_past_model.onnx"], "decoder_with_past_model.onnx"),
        (["text.onnx"], "text.onnx"),
        (["onnx/text.onnx", "onnx/vision_encoder.onnx"], "onnx/text.onnx"),
    ],
)
def test_the_decoder_of_a_folder(names: list[str], wanted: str, tmp_path: Path) -> None:
    touch(tmp_path, *names)
    assert decoder_in(tmp_path) == model_at(tmp_path) == tmp_path / wanted


@pytest.mark.parametrize(
    "names,named",
    [
        (
            ["config.json"],
            "not as ONNX; it must be exported: .*`python -m onnxruntime_genai.models.builder -i ",
        ),
        (["a.onnx", "b.onnx"], "none of its 2 .onnx files is called .*such as .*a.onnx"),
        (["vision_encoder.onnx"], "give an .onnx file, such as .*vision_encoder.onnx"),
    ],
)
def test_folders_where_no_model_is_meant(names: list[str], named: str, tmp_path: Path) -> None:
    touch(tmp_path, *names)
    with pytest.raises(ModelError, match=named):
        decoder_in(tmp_path)


@pytest.mark.parametrize(
    "config,named",
    [
        ({"model": {"decoder": {"filename": "../model.onnx"}}}, "is not in the folder"),
        ({"model": {"decoder": {"filename": "/etc/passwd"}}}, "is not in the folder"),
        ({"model": {"decoder": {"filename": "other.onnx"}}}, "names the file 'other.onnx'"),
        ({"model": {"decoder": {}}}, "names no file of a decoder"),
        ({"model": {"decoder": []}}, "names no file of a decoder"),
        ({"model": 3}, 'has no object "model"'),
        ([], "does not hold a JSON object"),
        (None, "cannot be read"),
    ],
)
def test_wrong_configurations(config: object, named: str, tmp_path: Path) -> None:
    touch(tmp_path, "model.onnx")
    text = "{" if config is None else json.dumps(config)
    (tmp_path / "genai_config.json").write_text(text)
    with pytest.raises(ModelError, match=named):
        decoder_in(tmp_path)


def test_other_paths_are_as_they_are(tmp_path: Path) -> None:
    touch(tmp_path, "m.par/plan.json", "model.onnx")
    for path in (tmp_path / "m.par", tmp_path / "model.onnx", tmp_path / "none"):
        assert model_at(path) == path


def test_only_files_of_a_language_model_go_along(tmp_path: Path) -> None:
    touch(tmp_path, "model.onnx", "config.json", "secret.txt")
    assert carried_files(tmp_path / "model.onnx") == {}  # of a folder that may hold anything
    touch(tmp_path, "tokenizer.json", "onnx/model.onnx", "1_Pooling/config.json")
    wanted = {name: tmp_path / name for name in ("config.json", "tokenizer.json")}
    wanted["pooling.json"] = tmp_path / "1_Pooling" / "config.json"
    assert carried_files(tmp_path / "model.onnx") == wanted
    assert carried_files(tmp_path / "onnx" / "model.onnx") == wanted


@pytest.mark.slow
def test_commands_take_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(LLAMA, "llama")
    for _ in range(2):  # the second time over the first
        assert main(["shard", "llama", "--devices", "2"]) == 0
    assert "written to llama.par" in capsys.readouterr().out
    carried = {name for name in CARRIED if (LLAMA / name).exists()}
    assert {"genai_config.json", "tokenizer.json"} <= carried
    assert carried == {f.name for f in Path("llama.par").iterdir()} & set(CARRIED)
    Path("llama.par", "tokenizer.json").write_text("{}")
    assert main(["generate", "llama.par", "x"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    touch(tmp_path, "empty/x")
    assert main(["plan", "empty", "--devices", "2"]) == 2
    assert "empty is a folder without an .onnx file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "is_hub"),
    [("meta-llama/Llama-3.2-1B", True), ("nowhere/model.onnx", False), ("nowhere/x.par", False)],
)
def test_names_of_the_hub_are_told_from_paths(
    name: str, is_hub: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shard", name, "--devices", "2"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"there is no file {name}" in said
    assert (f"optimum-cli export onnx --model {name}" in said) is is_hub
