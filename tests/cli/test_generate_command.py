"""`onnxpar generate`: what it prints, and what it refuses."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from cli.under_mpirun import check_one_rank_prints
from committed import MODELS

import onnxpar
from onnxpar.cli import main
from onnxpar.llm.generator import Generator


@pytest.fixture(scope="module")
def par(tmp_path_factory: pytest.TempPathFactory) -> str:
    par = tmp_path_factory.mktemp("llama") / "llama.par"
    onnxpar.shard(MODELS / "llm" / "llama", par, devices=2, preset="tensor-parallel")
    return str(par)


def test_a_text(par: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with Generator(par) as generator:
        (wanted,) = generator.generate("import os", max_new_tokens=20)
    assert main(["generate", par, "import os", "--max-new-tokens", "20"]) == 0
    printed = capsys.readouterr()
    assert printed.out == wanted.text + "\n"
    speed = r"onnxpar: \d+ tokens read, the first new one after [\d.]+ s; then [\d.]+ tokens/s \("
    assert re.match(speed + r"20 new, ended by length\)\n$", printed.err)
    (tmp_path / "prompt.txt").write_text("import os")
    assert main(["generate", par, "--file", f"{tmp_path}/prompt.txt", "--max-new-tokens=20"]) == 0
    assert capsys.readouterr().out == wanted.text + "\n"


def test_a_chat(
    par: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Generator(par) as generator:
        chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        (first,) = generator.generate(chat, max_new_tokens=8)
        chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and?"}]
        (second,) = generator.generate(chat, max_new_tokens=8)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand?\n"))
    asked = ["generate", par, "--chat", "--system", "be brief", "--max-new-tokens", "8"]
    assert main(asked) == 0
    assert capsys.readouterr().out == f"{first.text}\n{second.text}\n"
    assert main([*asked, "hello"]) == 0
    assert capsys.readouterr().out == f"{first.text}\n"


def test_drawn_texts(par: str, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        assert main(["generate", par, "x", "--max-new-tokens=12", "--sample", *options]) == 0
        return capsys.readouterr().out

    assert text("--seed=1") == text("--seed", "1") != text("--seed=2")
    assert text("--top-k=1") == text("--temperature=0") == text("--top-p=0", "--min-p=1")


def test_under_mpirun_one_rank_prints(par: str, tmp_path: Path) -> None:
    check_one_rank_prints(par, tmp_path)
    assert "tokens/s" in (tmp_path / "log" / "rank.0" / "stderr.log").read_text()


@pytest.mark.parametrize(
    "args,named",
    [
        ([], "give a prompt: onnxpar generate llm.par"),
        (["x", "--file", "y"], "give a prompt or --file, not both"),
        (["--file", "/no/such/file"], "--file /no/such/file: cannot read it as text"),
        (["--file", "/bin/true"], "--file /bin/true: cannot read it as text"),
        (["x", "--system", "y"], "--system is for chats: add --chat"),
        (["x", "--top-p", "0.5"], "--top-p is for drawing: add --sample"),
        (["x", "--sample", "--top-p", "7"], "top_p is 7.0; it must be at least 0, at most 1"),
        (["x", "--max-new-tokens", "0"], "give a larger max_new_tokens"),
        (["x", "--max-new-tokens", "many"], "'many' is not a whole number"),
    ],
)
def test_refused(args: list[str], named: str, par: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["generate", par, *args])
    except SystemExit as end:
        status = int(str(end.code))
    printed = capsys.readouterr()
    assert status == 2 and named in printed.err and not printed.out


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "/no/such/llm.par", "x"]) == 2
    assert "/no/such/llm.par" in capsys.readouterr().err
