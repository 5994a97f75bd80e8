"""Where tokens begin in their text, which may have characters of several tokens, and bytes that are
none."""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llm.test_streamed_text import FAMILIES, family, text_of
from serve.scripted_engine import FOLDER

from onnxpar.llm.requests import Token
from onnxpar.llm.tokenizer import Stream, Tokenizer
from onnxpar.serve.formats import CompletionFormat
from onnxpar.serve.generation_request import CompletionRequest
from onnxpar.serve.grammar import Grammars
from onnxpar.serve.placed_text import PlacedText, PlacedToken

PAD = 2
BYTES = {1: b"\xc3", 2: b"\xa9", 3: b"?", 4: b"\xc4", 5: "\u20ac!".encode()}


def bytes_by(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """The bytes of a token."""
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(ends=frozenset()), vocabulary=tokenizer.size, tokenizer=tokenizer
    )
    return Grammars(engine).bytes_of


def placed(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, list[int]]:
    """The text of tokens, and their places."""
    stream = Stream(tokenizer)
    text = PlacedText(stream, bytes_by(tokenizer))
    pieces, places = zip(*map(text.add, tokens), strict=True)
    assert text.length == len("".join(pieces) + stream.waiting)
    return "".join(pieces) + stream.end(), list(places)


def characters_of(data: bytes) -> list[int]:
    """Of each byte, the number of the character in which it is."""
    wrong: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        wrong.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("note", note)
    found: list[int] = []
    for character in data.decode("utf-8", "note"):
        at = len(found)
        size = wrong.pop(0)[1] - at if wrong and wrong[0][0] == at else len(character.encode())
        found += [found[-1] + 1 if found else 0] * size
    return found


def test_bytes_of_tokens() -> None:
    bytes_of = bytes_by(Tokenizer(FOLDER))
    assert {bytes_of(token) for token in range(3, 259)} == {bytes([byte]) for byte in range(256)}
    assert bytes_of(PAD) == b"<pad>"


def test_any_bytes() -> None:
    tokenizer, chosen = Tokenizer(FOLDER), random.Random(0)
    bytes_of = bytes_by(tokenizer)
    for _ in range(200):
        tokens = [chosen.choice((PAD, *range(3, 320))) for _ in range(chosen.randrange(1, 60))]
        each = [b"" if token == PAD else bytes_of(token) for token in tokens]
        data = b"".join(each)
        characters = [*characters_of(data), len(data.decode("utf-8", "replace"))]
        text, places = placed(tokenizer, tokens)
        assert text == data.decode("utf-8", "replace")
        at = 0
        for token, bytes_, place in zip(tokens, each, places, strict=True):
            assert token == PAD or place == characters[at]
            at += len(bytes_)


@pytest.mark.parametrize("name", [name for name in FAMILIES if "byte" in name])
def test_texts_of_families_with_bytes(name: str, tmp_path: Path) -> None:
    made: Any = family(name)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, chosen = Tokenizer(tmp_path), random.Random(0)
    for _ in range(20):
        tokens = made.encode(text_of(chosen)).ids
        if not tokens:
            continue
        text, places = placed(tokenizer, tokens)
        assert text == made.decode(tokens) and places == sorted(places)
        for token, place in zip(tokens, places, strict=True):
            alone = made.decode([token])
            if "\ufffd" not in alone:
                assert text[place:].lstrip().startswith(alone.strip().removeprefix("##"))


def test_tokens_with_other_bytes_differ() -> None:
    request = CompletionRequest(prompt="x", logprobs=2)
    form = CompletionFormat("m", request, BYTES.__getitem__, 1)
    tokens = [
        Token(1, -0.5, [(4, -0.2), (3, -0.3)]),
        Token(2, -0.1, [(2, -0.1)]),
        Token(3, -0.4, [(3, -0.4)]),
        Token(5, -0.6, [(5, -0.6)]),
    ]
    found = form._logprobs([PlacedToken.of(token, 7) for token in tokens])
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "?", "\u20ac!"]
    assert found["top_logprobs"][0] == {"bytes:\\xc4": -0.2, "?": -0.3, "bytes:\\xc3": -0.5}
    assert found["text_offset"] == [7] * 4
