"""Text to tokens and back, and chats to prompts, by a model's files in Hugging Face's formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any

from onnxpar.base.errors import ModelError
from onnxpar.base.read_bounded import read_bounded
from onnxpar.graph.model_folder import read_config
from onnxpar.llm.messages import Messages

_SPECIALS = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
"""The names by which templates know special tokens."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The text of the bytes of a character while some are missing, and of bytes that are no
character."""
_MOST_WAITING = 3
"""Most bytes that can wait for the rest of a character, and most `UNFINISHED` that they become."""
_MOST_TOKENS = 32
"""Most tokens whose text is not complete before those in their middle are forgotten."""
_FIRST, _LAST = 4, 12
"""The tokens at both ends that stay: four bytes tell whether they are a character."""


class Tokenizer:
    """The tokenizer and the chat template in a model's folder. Errors: ModelError if there is no
    tokenizer, or it cannot be read."""

    def __init__(self, folder: Path) -> None:
        try:
            import tokenizers

            from onnxpar.llm.chat_template import ChatTemplate, read_template
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
        added = self._tokenizer.get_added_tokens_decoder()
        self._specials = frozenset(token for token, entry in added.items() if entry.special)
        self._config = _configuration(folder)
        self._folder = folder
        template = read_template(folder, self._config)
        specials = {name: text for name in _SPECIALS if (text := self.special(name)) is not None}
        self._template = None
        if template is not None:
            for_tools = read_template(folder, self._config, "tool_use")
            self._template = ChatTemplate(template, specials, for_tools)

    def encode(self, text: str, specials: bool = True) -> list[int]:
        """Returns the tokens of a text; with `specials`, also the special tokens that the tokenizer
        adds to each text, such as one that begins it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=specials).ids
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of two texts as one sequence, and for each token 0 or 1: the text to
        which it belongs, as the tokenizer says."""
        encoding = self._tokenizer.encode(first, second)
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Sequence[int], specials: bool = False) -> str:
        """Returns the text of tokens; with `specials`, including the text of special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not specials)
        return text

    def has_text(self, token: int, specials: bool = False) -> bool:
        """Returns False for a token that `decode` leaves out: an id that is not in the vocabulary,
        or a special token without `specials`."""
        is_left_out = token in self._specials and not specials
        return not is_left_out and self._tokenizer.id_to_token(token) is not None

    def token(self, token: int) -> str | None:
        """Returns a token as the vocabulary writes it; None for an id without a token."""
        text: str | None = self._tokenizer.id_to_token(token)
        return text

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Returns the ids of those texts that are special tokens."""
        return self._specials.intersection(map(self.id_of, texts))

    def as_json(self) -> str:
        """Returns the content of tokenizer.json, for other libraries, without truncation and
        padding."""
        data = json.loads(self._tokenizer.to_str())
        return json.dumps({**data, "truncation": None, "padding": None})

    @property
    def size(self) -> int:
        """The highest id plus 1; some ids below may have no token."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat(self) -> bool:
        """True if there is a chat template."""
        return self._template is not None

    @property
    def tool_template(self) -> str:
        """The text of the template of chats with tools; empty if there is none."""
        return "" if self._template is None else self._template.for_tools

    def special(self, name: str) -> str | None:
        """Returns the text of a special token, such as eos_token; None if there is none."""
        value = self._config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, written as in the vocabulary; None if there is no such
        token."""
        id_: int | None = self._tokenizer.token_to_id(token)
        return id_

    def chat(self, messages: Messages, specials: bool = False, **options: Any) -> list[int]:
        """Returns the tokens of a chat, and of the beginning of the answer to it. With `specials`,
        also the special tokens that the tokenizer adds to each text, which most templates write
        themselves.

        Options and errors are those of `ChatTemplate.render`; also ModelError if there is no
        template.
        """
        if self._template is None:
            raise ModelError(
                f"{self._folder} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give a text instead of a chat"
            )
        return self.encode(self._template.render(messages, **options), specials)


class Stream:
    """Turns tokens that come one by one into text, piece by piece. Together, the pieces are what
    `Tokenizer.decode` returns for all tokens, with special tokens if `specials`. Only around bytes
    that turn out to be no character may they differ: there a tokenizer also replaces characters
    before these bytes, but they have been sent already.

    Text is complete where it does not end within a character. A decoder reads the tokens since the
    last such place, and some before it: at the beginning of a text, many leave out a space.
    `DecodeStream` of tokenizers does the same, but it has no end, sends bytes that are no character
    only with the next one that is, and fails where bytes behind a character are none.

    behind  tokens whose text this one continues
    shown   special tokens whose text is shown anyway
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        specials: bool = False,
        behind: Sequence[int] = (),
        shown: Set[int] = frozenset(),
    ) -> None:
        self._tokenizer, self._specials, self._shown = tokenizer, specials, shown
        self._context = [[token for token in behind[-_LAST:] if self.has_text(token)]]
        """The last tokens whose text is complete, in the pieces in which it became so."""
        self._before = self._decode(self._context[0])
        """The text of `_context`."""
        self._tokens: list[int] = []
        """The tokens after the context."""
        self._sent = 0
        """How many characters of their text are sent."""
        self.waiting = ""
        """The text that would be sent if no token followed."""

    def has_text(self, token: int) -> bool:
        """Returns False for a token that adds nothing to the text."""
        return self._tokenizer.has_text(token, self._specials or token in self._shown)

    def add(self, token: int) -> str:
        """Adds a token; returns the text that is complete now. Bytes of an unfinished character
        wait for the next tokens."""
        if not self.has_text(token):
            return ""
        self._tokens.append(token)
        text = self._text()
        if len(text) < self._sent + len(self.waiting):
            return self.end()  # several bytes became one character, perhaps `UNFINISHED` itself
        begun = min(len(text) - len(text.rstrip(UNFINISHED)), _MOST_WAITING)
        return self._send(text, len(text) - begun)

    def end(self) -> str:
        """Returns the text that still waits."""
        text = self._text()
        return self._send(text, len(text))

    def _decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([*tokens], self._specials or bool(self._shown))

    def _text(self) -> str:
        """Returns the text of the tokens after the context."""
        alone = self._decode(self._tokens)
        text = self._decode(chain(*self._context, self._tokens))
        unfinished = self._before.count(UNFINISHED) + alone.count(UNFINISHED)
        if text.startswith(self._before) and text.count(UNFINISHED) == unfinished:
            return text[len(self._before) :]
        # Byte fallback decodes all bytes in a row or none: here also those of the context.
        return alone

    def _send(self, text: str, end: int) -> str:
        """Returns the part of `text` that is not sent yet, up to character `end`, and records it as
        sent."""
        new, self.waiting = text[self._sent : end], text[max(end, self._sent) :]
        self._sent = max(self._sent, end)
        if text and not self.waiting:
            self._begin_behind()
        elif len(self._tokens) > _MOST_TOKENS:  # so that the time of a token does not grow
            del self._tokens[_FIRST:-_LAST]
            self._sent = max(len(self._text()) - len(self.waiting), 0)
        return new

    def _begin_behind(self) -> None:
        """Makes all tokens so far the context for those to come, and drops the earliest tokens of
        it. Tokens with some text stay: behind tokens without text, a decoder would leave out a
        space."""
        self._context.append(self._tokens)
        while len(self._context) > 1 and self._decode(chain(*self._context[1:])):
            del self._context[0]
        self._before = self._decode(chain(*self._context))
        self._tokens, self._sent = [], 0


def _configuration(folder: Path) -> Mapping[str, Any]:
    """Returns tokenizer_config.json; older folders have the special tokens in a separate file,
    which is added. Errors: ModelError if a file cannot be read."""
    main, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    config = dict(read_config(main)) if main.exists() else {}
    if "added_tokens_decoder" not in config and older.exists():
        config |= read_config(older)
    return config
