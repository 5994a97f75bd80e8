"""`onnxpar generate`: what it prints, and what it refuses."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from cli.under_mpirun import check_one_rank_prints
from committed import MODELS
from sharded import sharded

from onnxpar.cli import main
from onnxpar.llm.generator import Generator


@pytest.fixture(scope="module")
def par() -> str:
    return str(sharded(MODELS / "llm" / "llama", devices=2, preset="tensor-parallel"))


@pytest.mark.slow
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


@pytest.mark.slow
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


def counted(generator: Generator, chat: list[dict[str, str]]) -> int:
    return len(generator.tokenizer.chat(chat))


@pytest.mark.slow
def test_a_long_talk_forgets_its_oldest_messages(
    par: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [f"tell me more about number {i} please" for i in range(30)]
    chat = system = [{"role": "system", "content": "be brief"}]
    wanted, told = [], []
    with Generator(par) as generator:
        for message in messages:
            whole = chat = [*chat, {"role": "user", "content": message}]
            while counted(generator, chat) >= 512:
                chat = [*system, *chat[3:]]
            told += [len(whole) - len(chat)] * (whole != chat)
            (answer,) = generator.generate(chat, max_new_tokens=10)
            wanted.append(answer.text)
            chat = [*chat, {"role": "assistant", "content": answer.text}]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(messages)))
    asked = ["generate", par, "--chat", "--system", "be brief", "--max-new-tokens", "10"]
    assert main(asked) == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(f"{text}\n" for text in wanted)
    forgotten = r"onnxpar: the talk is longer than the model's context; its oldest (\d+) messages "
    found = re.findall(forgotten + "are forgotten\n", printed.err)
    assert told and [int(number) for number in found] == told


@pytest.mark.slow
def test_a_message_without_room_is_not_kept(
    par: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(*messages: str) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(messages)))
        assert main(["generate", par, "--chat", "--max-new-tokens", "8"]) == 0
        printed = capsys.readouterr()
        return printed.out, printed.err

    wanted, _ = talk("hello", "and?")
    found, told = talk("hello", "x y " * 300, "and?")
    assert found == wanted and "its oldest" not in told
    refused = (
        r"onnxpar: this message has no room and is forgotten: a prompt has \d+ tokens, and the "
    )
    assert len(re.findall(refused + "model's context 512; give a shorter one\n", told)) == 1


def test_a_talk_has_the_room_of_the_caches(
    par: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxpar.llm.generator.count_pages", lambda *_: 4)  # of 16 tokens
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n" + "x y " * 50))
    assert main(["generate", par, "--chat", "--max-new-tokens", "16"]) == 0
    printed = capsys.readouterr()
    assert "the talk is longer than the cache; its oldest 2 messages are forgotten" in printed.err
    assert "the cache 64; give a shorter one" in printed.err


def test_help_is_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    description = capsys.readouterr().out.split("\n\n")[1]
    assert "tokenizer.json." in description and max(map(len, description.splitlines())) <= 80


@pytest.mark.slow
def test_drawn_texts(par: str, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        assert main(["generate", par, "x", "--max-new-tokens=12", "--sample", *options]) == 0
        return capsys.readouterr().out

    assert text("--seed=1") == text("--seed", "1") != text("--seed=2")
    assert text("--top-k=1") == text("--temperature=0") == text("--top-p=0", "--min-p=1")


@pytest.mark.slow
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
        (["x", "--max-new-tokens", "0"], "--max-new-tokens is 0; it must be at least 1"),
        (["x", "--max-new-tokens", "-3"], "--max-new-tokens is -3; it must be at least 1"),
        (["x", "--language", "de"], "--language is for speech models and translators; leave it"),
        (["x", "--max-new-tokens", "many"], "'many' is not a whole number"),
        (["text", "--audio", "a.wav"], "--audio is the prompt: leave other prompts"),
        (["--audio", "a.wav", "--chat"], "--audio is the prompt: leave other prompts"),
        (["text", "--task", "translate"], "--task is for speech: add --audio FILE"),
        (
            ["text", "--task", "sing"],
            "--task: 'sing' is not a choice; give one of transcribe, translate",
        ),
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
