"""The tools of a request: functions that an answer may call, or must."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnxpar.llm.tokenizer import Messages


@dataclass(frozen=True)
class Tools:
    """The functions that an answer may call.

    parameters    the JSON schemas of their parameters, by name
    are_required  True if it must call one
    is_parallel   True if it may call several
    """

    parameters: Mapping[str, Mapping[str, Any]]
    are_required: bool
    is_parallel: bool


def with_ids(messages: Messages, form: str) -> Messages:
    """Returns a chat whose calls, and answers to them, have ids of a form: of the `name` and the
    `number` of each call."""
    numbers, ids = itertools.count(), dict[Any, str]()
    found = []
    for message in messages:
        new: dict[str, Any] = {}
        for call in message.get("tool_calls") or ():
            ids[call["id"]] = form.format(name=call["function"]["name"], number=next(numbers))
            new.setdefault("tool_calls", []).append({**call, "id": ids[call["id"]]})
        if message.get("tool_call_id") in ids:
            new["tool_call_id"] = ids[message["tool_call_id"]]
        found.append({**message, **new})
    return found
