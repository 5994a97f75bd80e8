"""The tools of a request: functions that an answer may or must call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnxpar.llm.messages import Messages


@dataclass(frozen=True)
class Tools:
    """The functions that an answer may call.

    parameters    the JSON schemas of their parameters, by name
    are_required  True if an answer must call a function
    is_parallel   True if an answer may call several functions
    """

    parameters: Mapping[str, Mapping[str, Any]]
    are_required: bool
    is_parallel: bool


def with_ids(messages: Messages, form: str) -> Messages:
    """Returns a chat in which calls of tools, and the messages with their results, have ids of the
    format `form`: "functions.{name}:{number}" gives functions.add:0, functions.add:1 ..."""
    numbers, ids = itertools.count(), dict[Any, str]()
    renumbered = []
    for message in messages:
        new: dict[str, Any] = {}
        for call in message.get("tool_calls") or ():
            ids[call["id"]] = form.format(name=call["function"]["name"], number=next(numbers))
            new.setdefault("tool_calls", []).append({**call, "id": ids[call["id"]]})
        if message.get("tool_call_id") in ids:
            new["tool_call_id"] = ids[message["tool_call_id"]]
        renumbered.append({**message, **new})
    return renumbered
