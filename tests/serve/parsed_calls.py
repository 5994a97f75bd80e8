"""Texts with calls of tools, parsed in whatever pieces they come."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from lazily import lazily
from serve.scripted_engine import FOLDER

from onnxpar.serve.answer_parts import CallArguments, CallBegin, CallEnd, Calls, Text
from onnxpar.serve.tool_families import FAMILIES
from onnxpar.serve.tool_parser import ToolParser

tokenizers = lazily("tokenizers")
Case = tuple[str, str, str, Sequence[tuple[str, dict[str, Any]]]]
"""A family, a text, its content and its calls."""
_TYPES = ("string", "integer", "number", "boolean", "object", "array")
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "get_current_weather": {
        "properties": {name: {"type": "string"} for name in ("city", "state", "unit")}
    },
    "calculate_area": {
        "properties": {
            "shape": {"type": "string"},
            "dimensions": {"type": "object"},
            "precision": {"type": "integer"},
        }
    },
    "types": {"properties": {name: {"type": name} for name in _TYPES}},
    "now": {},
    "math.add": {},
}


@cache
def tokenizer() -> Any:
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def pieces(text: str) -> Iterator[list[str]]:
    """A text whole, in characters, in tokens, and in random pieces."""
    yield [text]
    yield list(text)
    drawn = random.Random(text)
    tokens = sorted({begin for begin, _ in tokenizer().encode(text).offsets})
    for cuts in (tokens, *(sorted(drawn.choices(range(len(text)), k=9)) for _ in range(3))):
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parsed(
    family: str, each: list[str], is_cut: bool = False
) -> tuple[str, list[tuple[str, str]], list[str]]:
    """The content, the calls that are not malformed, and how each call ends; checks the order of
    what is streamed, and that the arguments of calls that are right are objects."""
    parser = ToolParser(FAMILIES[family], FUNCTIONS)
    parts = [part for piece in each for part in parser.add(piece)]
    parts += parser.add("", is_last=True, is_cut=is_cut)
    calls, open_, ends = Calls(), None, list[str]()
    for part in parts:
        calls.add(part)
        if isinstance(part, CallBegin):
            assert open_ is None and part.index == len(ends) and part.id.isalnum()
            open_ = part.index
        elif isinstance(part, CallArguments):
            assert part.index == open_ and part.text
        elif isinstance(part, CallEnd):
            assert part.index == open_
            open_ = None
            ends.append(part.outcome)
        else:
            assert open_ is None and part.text
    assert open_ is None and parser.calls == ends.count("right")
    hows = [how for how in ends if how != "malformed"]
    for call, how in zip(calls.well_formed, hows, strict=True):
        assert how == "cut" or isinstance(json.loads(call.arguments), dict)
    content = "".join(part.text for part in parts if isinstance(part, Text))
    return content, [(call.name, call.arguments) for call in calls.well_formed], ends


def check(family: str, text: str, content: str, calls: Sequence[tuple[str, Any]]) -> list[str]:
    """Parses a text, however it comes; returns how each call ends."""
    for each in pieces(text):
        found, made, ends = parsed(family, each)
        assert found == content, each
        assert [(name, json.loads(arguments)) for name, arguments in made] == list(calls)
    return ends
