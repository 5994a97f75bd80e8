"""Text to tokens and back, and chats to prompts, by the files of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from reprlib import repr as shortly
from typing import Any, NoReturn

from onnxpar.errors import InputError, ModelError
from onnxpar.files.read_bounded import read_bounded
from onnxpar.model.model_folder import read_config

Messages = Sequence[Mapping[str, Any]]
"""A chat: objects with `role` and `content`."""
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character become while some of them are missing."""


class Tokenizer:
    """The tokenizer and the chat template of a folder. Errors: ModelError."""

    def __init__(self, folder: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ModelError(
                "text needs the packages tokenizers and jinja2: pip install 'onnxpar[llm]'"
            ) from None
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ModelError(
                f"{folder} has no tokenizer.json; shard a folder that has one beside the model, or "
                "give token ids instead of text"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(read_bounded(file))
        except Exception as error:  # tokenizers raises Exception itself
            raise ModelError(f"{file} cannot be read: {error}; copy it again") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = folder / "tokenizer_config.json"
        self._config = read_config(config) if config.exists() else {}
        self._template = _template(folder, self._config)
        self._folder = folder

    def encode(self, text: str, specials: bool = True) -> list[int]:
        """Returns the tokens of a text; with `specials`, also those that begin each text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=specials).ids
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of two texts together, and of each token, to which text it belongs: 0
        or 1, as the tokenizer says."""
        found = self._tokenizer.encode(first, second)
        return found.ids, found.type_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def as_json(self) -> str:
        """Returns tokenizer.json for other libraries, without limits on lengths."""
        found = json.loads(self._tokenizer.to_str())
        return json.dumps({**found, "truncation": None, "padding": None})

    @property
    def has_chat(self) -> bool:
        """True if there is a chat template."""
        return self._template is not None

    def special(self, name: str) -> str | None:
        """Returns the text of a special token, such as eos_token; None if there is none."""
        found = self._config.get(name)
        found = found.get("content") if isinstance(found, dict) else found
        return found if isinstance(found, str) else None

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def chat(self, messages: Messages) -> list[int]:
        """Returns the tokens of a chat and of the beginning of the answer to it. Errors: InputError
        for messages without a role or a text, or that the template refuses; ModelError if there is
        no template."""
        if self._template is None:
            raise ModelError(
                f"{self._folder} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give a text instead of a chat"
            )
        for number, message in enumerate(messages, 1):
            _check_message(message, f"message {number} of the chat")
        return self.encode(_rendered(self._template, messages, self), specials=False)


class Stream:
    """The text of tokens that come one by one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._done = ""

    def add(self, token: int) -> str:
        """Adds a token; returns the text that is complete now. Bytes of an unfinished character
        wait for the next token."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith(_UNFINISHED) or not text.startswith(self._done):
            return ""
        return self._move(text)

    def end(self) -> str:
        """Returns the text of what still waits."""
        return self._move(self._tokenizer.decode(self._ids[self._start :]))

    def _move(self, text: str) -> str:
        new = text[len(self._done) :]
        self._done = text
        if len(self._ids) - self._start > 16:  # so that the time of a token does not grow
            self._start = len(self._ids) - 8
            self._done = self._tokenizer.decode(self._ids[self._start :])
        return new


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template of a folder. Errors: ModelError."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return read_bounded(file).decode("utf-8", "replace")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {error}; copy it again") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {e.get("name"): e.get("template") for e in found if isinstance(e, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _check_message(message: object, name: str) -> None:
    """Errors: InputError for a message without a role or without text. One that calls tools needs
    no text."""
    if not isinstance(message, Mapping):
        raise InputError(f"{name} is no object; give it a role and a content")
    role, content = message.get("role"), message.get("content")
    calls_tools = content is None and bool(message.get("tool_calls"))
    checks = (
        ("role", role, isinstance(role, str)),
        ("content", content, calls_tools or _is_text(content)),
    )
    for key, value, is_right in checks:
        if not is_right:
            found = f"no {key!r}" if value is None else f"{shortly(value)} as {key!r}"
            raise InputError(f"{name} has {found}; give a text")


def _is_text(content: object) -> bool:
    """True for a text, or a list of parts that have texts."""
    if not isinstance(content, list | tuple):
        return isinstance(content, str)
    return all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content)


def _rendered(template: str, messages: Messages, tokenizer: Tokenizer) -> str:
    """The text of a chat, by a template that runs in Jinja's sandbox."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def as_json(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    specials = {name: tokenizer.special(name) or "" for name in names}
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **specials
        )
    except jinja2.TemplateError as error:
        raise InputError(f"the chat template refuses the messages: {error}") from None
