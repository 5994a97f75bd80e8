"""Models of Hugging Face are exported once, into a cache; the exporter is a stand-in here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import onnxpar
from onnxpar.base.errors import ModelError
from onnxpar.cli.command_line import main
from onnxpar.graph import hugging_face
from onnxpar.graph.hugging_face import exported, task_of
from onnxpar.graph.model_folder import model_at

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "models" / "llm" / "llama"
EXPORTS = """
import pathlib, shutil, sys, time
*_, task, output = sys.argv[1:]
with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
    calls.write(task + "\\n")
for file in pathlib.Path({source!r}).iterdir():
    if file.name != "genai_config.json":
        shutil.copy(file, output)
time.sleep({seconds})
"""
FAILS = """
import pathlib, sys
pathlib.Path(sys.argv[-1], "model.onnx").touch()
print("it is downloaded")
sys.exit("Traceback\\nValueError: no such architecture\\n\\nUpdate it.\\n")
"""
COMPLAINS = "raise SystemExit('no space')"
SAYS_NOTHING = "import os; os.kill(os.getpid(), 9)"
Install = Callable[[str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a program in the place of the exporter; returns the file with the tasks of its calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hugging_face, "PACKAGES", ("numpy", "no-such-package"))

    def put(program: str) -> Path:
        (tmp_path / "exporter.py").write_text(program)
        monkeypatch.setattr(hugging_face, "EXPORTER", (str(tmp_path / "exporter.py"),))
        return tmp_path / "calls"

    return put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as `save_pretrained` writes it."""
    made = tmp_path / "Llama-3.2-1B"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def left(cache: Path) -> set[str]:
    """The files in the cache."""
    return {file.name for file in cache.rglob("*") if file.is_file()}


def working(seconds: float = 0.0) -> str:
    return EXPORTS.format(source=str(LLAMA), seconds=seconds)


def test_a_model_is_exported_once_and_again_after_a_change(folder: Path, install: Install) -> None:
    calls = install(working())
    first = exported(folder)
    assert first.name == folder.name and (first / "model.onnx").is_file()
    assert exported(folder) == exported(first) == first
    assert calls.read_text() == "text-generation-with-past\n"
    assert ".onnxpar.lock" not in left(first.parents[1])
    (folder / "model.safetensors").write_bytes(b"others.")
    os.utime(folder / "model.safetensors", (1, 1))
    second = exported(folder)
    assert second != first and calls.read_text().count("\n") == 2
    (folder / "config.json").write_text("{}")
    assert exported(folder) not in (first, second)
    assert calls.read_text().splitlines()[2] == "feature-extraction"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (FAILS, "ValueError: no such architecture"),
        (COMPLAINS, "no space"),
        (SAYS_NOTHING, "status -9"),
        ("", "status 0"),
    ],
)
def test_a_failure_leaves_nothing(
    program: str, said: str, folder: Path, install: Install, tmp_path: Path
) -> None:
    install(program)
    with pytest.raises(ModelError) as failure:
        model_at(folder)
    assert f"{folder} cannot be exported: {said}; to export it by hand, run " in str(failure.value)
    by_hand = f"--model {folder} --task text-generation-with-past Llama-3.2-1B-onnx`"
    assert by_hand in str(failure.value)
    assert not list((tmp_path / "cache").rglob("*/*/*"))
    calls = install(working())
    assert model_at(folder).is_file() and calls.read_text()


def test_processes_at_once_export_it_once(folder: Path, install: Install) -> None:
    calls = install(working(seconds=0.5))
    program = f"""
from pathlib import Path
from onnxpar.graph import hugging_face as hf
hf.PACKAGES, hf.EXPORTER = {hugging_face.PACKAGES!r}, {hugging_face.EXPORTER!r}
print(hf.exported(Path({str(folder)!r})))
"""
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {each.communicate()[0].strip() for each in both}
    assert [each.returncode for each in both] == [0, 0]
    assert found == {str(exported(folder))} and calls.read_text().count("\n") == 1


def test_an_exporter_that_is_killed_with_its_command_leaves_nothing(
    folder: Path, install: Install, tmp_path: Path
) -> None:
    calls = install(working(seconds=60))
    program = f"""
from pathlib import Path
from onnxpar.cli import main
from onnxpar.graph import hugging_face as hf
hf.PACKAGES, hf.EXPORTER = {hugging_face.PACKAGES!r}, {hugging_face.EXPORTER!r}
main(["plan", {str(folder)!r}, "--devices", "2"])
"""
    command = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    while not calls.exists():
        assert command.poll() is None
        time.sleep(0.05)
    command.terminate()
    assert "onnxpar: terminated" in command.communicate(timeout=30)[1]
    assert not left(tmp_path / "cache" / "onnxpar")


def test_commands_and_calls_take_such_a_folder(
    folder: Path, install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    calls = install(working())
    monkeypatch.chdir(folder.parent)
    shown = ["plan", folder.name, "--devices", "2", "--preset", "tensor-parallel"]
    assert main(shown) == 0
    told = capsys.readouterr()
    assert told.err.startswith("onnxpar: exporting Llama-3.2-1B with numpy ")
    assert told.err.count("\n") == 1
    assert told.out.startswith("Llama-3.2-1B over 2 ranks")
    assert main(shown) == 0
    assert capsys.readouterr() == (told.out, "")
    onnxpar.shard(folder, devices=2, preset="tensor-parallel")
    assert Path("Llama-3.2-1B.par", "tokenizer.json").is_file()
    assert calls.read_text().count("\n") == 1
    shutil.rmtree("cache")
    assert main([*shown, "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_names_of_the_hub(
    folder: Path, install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    install(working())
    asked = []

    def snapshot_download(name: str, **how: object) -> str:
        asked.append(name)
        if name == "meta/none":
            raise OSError("404 Client Error\nRepository Not Found")
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    found = exported(Path("meta/Llama-1B"))
    assert found.name == "Llama-1B" and exported(Path("meta/Llama-1B")) == found
    assert asked == ["meta/Llama-1B"]
    with pytest.raises(ModelError, match=r"no file meta/none, and the hub .*: Repository Not"):
        exported(Path("meta/none"))


@pytest.mark.parametrize("name", ["a.onnx", "onnx/a.onnx", "genai_config.json", "no config"])
def test_other_folders_are_as_they_are(name: str, folder: Path, install: Install) -> None:
    calls = install(working())
    if name == "no config":
        (folder / "config.json").unlink()
    else:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    assert exported(folder) == folder and not calls.exists()


def test_without_the_exporter_the_error_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugging_face, "PACKAGES", ("no-such-package",))
    named = r"pip install 'onnxpar\[hf\]'.*--task text-generation-with-past Llama-3.2-1B-onnx"
    with pytest.raises(ModelError, match=named):
        model_at(folder)


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ('{"architectures": ["GPT2LMHeadModel"]}', "text-generation-with-past"),
        ('{"architectures": ["T5ForConditionalGeneration"]}', "text2text-generation-with-past"),
        (
            '{"architectures": ["WhisperForConditionalGeneration"]}',
            "automatic-speech-recognition-with-past",
        ),
        ('{"architectures": ["BertForSequenceClassification"]}', "text-classification"),
        ('{"architectures": ["BertModel"]}', "feature-extraction"),
        ('{"architectures": []}', "feature-extraction"),
        ("[", "feature-extraction"),
        ("3", "feature-extraction"),
    ],
)
def test_the_task_of_a_model(config: str, task: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert task_of(tmp_path) == task
