"""`onnxpar generate` with encoder-decoders: text to text, and speech to text."""

from __future__ import annotations

import re
import wave
from pathlib import Path

import numpy as np
import pytest
from cli.under_mpirun import check_one_rank_prints
from committed import MODELS
from sharded import sharded
from sounds import RATE, sound

from onnxpar.cli import main
from onnxpar.llm.generator import Generator


@pytest.fixture(scope="module")
def t5() -> str:
    return str(sharded(MODELS / "llm" / "t5", devices=2, preset="tensor-parallel"))


@pytest.fixture(scope="module")
def whisper() -> str:
    return str(sharded(MODELS / "llm" / "whisper", devices=2, preset="tensor-parallel"))


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    """Three seconds: two windows."""
    with wave.open(str(tmp_path / "speech.wav"), "wb") as stream:
        stream.setparams((1, 2, RATE, 0, "NONE", ""))
        stream.writeframes(sound(7, 3).tobytes())
    return tmp_path / "speech.wav"


@pytest.mark.slow
def test_a_text(t5: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Generator(t5) as generator:
        (wanted,) = generator.generate("import os", max_new_tokens=20)
    assert main(["generate", t5, "import os", "--max-new-tokens", "20"]) == 0
    printed = capsys.readouterr()
    assert printed.out == wanted.text + "\n"
    assert re.match(rf"onnxpar: {wanted.prompt} tokens read, the first new one", printed.err)


@pytest.mark.slow
def test_speech_in_windows(
    whisper: str, speech: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    samples = sound(7, 3) / 32768
    asked = {"language": "de", "task": "translate", "max_new_tokens": 9}
    with Generator(whisper) as generator:
        windows = generator.sound.windows(samples)
        wanted = "".join(f"{generator.generate(w, **asked)[0].text}\n" for w in windows)
        features = generator.sound.of_sound(windows[0])
    options = ["--language", "de", "--task", "translate", "--max-new-tokens=9"]
    assert main(["generate", whisper, "--audio", str(speech), *options]) == 0
    printed = capsys.readouterr()
    assert printed.out == wanted
    assert "2.0 s of sound read" in printed.err and "1.0 s of sound read" in printed.err
    np.save(tmp_path / "samples.npy", samples)
    assert main(["generate", whisper, "--audio", f"{tmp_path}/samples.npy", *options]) == 0
    assert capsys.readouterr().out == wanted
    np.save(tmp_path / "features.npy", features)
    assert main(["generate", whisper, "--audio", f"{tmp_path}/features.npy", *options]) == 0
    printed = capsys.readouterr()
    assert printed.out == wanted.splitlines(keepends=True)[0] and "features read" in printed.err


@pytest.mark.slow
def test_under_mpirun_one_rank_prints(t5: str, tmp_path: Path) -> None:
    check_one_rank_prints(t5, tmp_path)


@pytest.mark.slow
def test_sound_for_a_text_model(t5: str, speech: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", t5, "--audio", str(speech)]) == 2
    assert "the model reads text, not sound; give a text" in capsys.readouterr().err


@pytest.mark.slow
def test_serving_is_refused(t5: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", t5, "--port", "0"]) == 2
    assert "is an encoder-decoder, which cannot be served yet" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "args,named",
    [
        (["text"], "the prompt is text, and the model reads speech"),
        (["--audio", "/no/such/file.wav"], "/no/such/file.wav: cannot read it"),
        (["--audio", "/no/such/file.npy"], "/no/such/file.npy: cannot read it as an array"),
        (["--audio", "/bin/true"], "/bin/true is no WAV file"),
    ],
)
def test_refused(
    args: list[str], named: str, whisper: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["generate", whisper, *args])
    except SystemExit as end:
        status = int(str(end.code))
    printed = capsys.readouterr()
    assert status == 2 and named in printed.err and not printed.out


@pytest.mark.slow
def test_arrays_that_are_no_sound(
    whisper: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 4)))
    assert main(["generate", whisper, "--audio", f"{tmp_path}/a.npy"]) == 2
    assert "float64 [2, 3, 4]; give samples between -1 and 1" in capsys.readouterr().err
