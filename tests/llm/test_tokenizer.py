"""Tokens to text as they come, and chats to prompts."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from committed import MODELS

from onnxpar.base.errors import InputError, ModelError
from onnxpar.llm.tokenizer import Stream, Tokenizer

LLAMA = MODELS / "llm" / "llama"
TEXTS = (
    "plain words",
    "naïve café",
    "日本語のテキスト",
    "👩\u200d👧 and 🇨🇭",
    "tabs\tand\n\n lines ",
    " x",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a folder, without its model."""
    for file in LLAMA.iterdir():
        if not file.name.startswith("model.onnx"):
            shutil.copy(file, tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back(text: str) -> None:
    tokenizer = Tokenizer(LLAMA)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", [*TEXTS, "".join(TEXTS) * 20])
def test_characters_come_whole(text: str) -> None:
    tokenizer = Tokenizer(LLAMA)
    stream = Stream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(pieces) + stream.end() == text


def test_any_tokens_give_their_text() -> None:
    tokenizer = Tokenizer(LLAMA)
    chosen = random.Random(0)
    for _ in range(100):
        tokens = [chosen.randrange(3, 320) for _ in range(chosen.randrange(1, 80))]
        stream = Stream(tokenizer)
        assert "".join(map(stream.add, tokens)) + stream.end() == tokenizer.decode(tokens)


def test_templates_run_in_a_sandbox(folder: Path) -> None:
    def render(template: str) -> str:
        (folder / "chat_template.jinja").write_text(template)
        tokenizer = Tokenizer(folder)
        return tokenizer.decode(tokenizer.chat([{"role": "user", "content": "hi"}]))

    assert render("{{ messages[0].content }}{{ messages | tojson }}").startswith('hi[{"role"')
    assert render("{% for m in messages %}{% break %}{% endfor %}done") == "done"
    assert render("{{ 1 if add_generation_prompt else 2 }}") == "1"
    refused = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system') }}",
        "{% if %}",
    )
    for template in refused:
        with pytest.raises(InputError, match="the chat template refuses the messages"):
            render(template)


@pytest.mark.parametrize(
    "message,named",
    [
        ({"role": "user"}, "message 2 of the chat has no 'content'; give a text"),
        ({"content": "x"}, "message 2 of the chat has no 'role'; give a text"),
        ({"foo": "x"}, "message 2 of the chat has no 'role'; give a text"),
        ({"role": "user", "content": None}, "message 2 of the chat has no 'content'"),
        ({"role": "user", "content": 5}, "message 2 of the chat has 5 as 'content'; give a text"),
        ({"role": 5, "content": "x"}, "message 2 of the chat has 5 as 'role'; give a text"),
        ({"role": "user", "content": [{"type": "image"}]}, "has .*image.* as 'content'"),
        ({"role": "user", "content": ["x"]}, r"has \['x'\] as 'content'"),
        ("x", "message 2 of the chat is no object; give it a role and a content"),
    ],
)
def test_wrong_messages_are_named(message: object, named: str) -> None:
    chat = [{"role": "user", "content": "hi"}, message]
    with pytest.raises(InputError, match=named):
        Tokenizer(LLAMA).chat(chat)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "hello"}]},
    ],
)
def test_parts_and_calls_of_tools_reach_the_template(folder: Path, message: dict[str, Any]) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}")
    tokenizer = Tokenizer(folder)
    assert json.loads(tokenizer.decode(tokenizer.chat([message]))) == [message]


def test_templates_are_where_files_have_them(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_bytes())

    def chat(found: object) -> str:
        file.write_text(json.dumps(config | {"chat_template": found}))
        tokenizer = Tokenizer(folder)
        return tokenizer.decode(tokenizer.chat([]))

    assert chat("one") == "one"
    assert chat([{"name": "tool", "template": "a"}, {"name": "default", "template": "b"}]) == "b"
    with pytest.raises(ModelError, match="has no chat template"):
        chat(None)


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"model": 3}'])
def test_damaged_files_are_named(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read: "):
        Tokenizer(folder)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=f"{name} cannot be read: it is not a file"):
        Tokenizer(folder)


def test_a_damaged_configuration_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config.json does not hold a JSON object"):
        Tokenizer(folder)
