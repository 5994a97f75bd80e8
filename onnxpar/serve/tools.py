"""The tools of a request: functions that an answer may call, or must."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxpar.llm.tokenizer import Messages
from onnxpar.serve.api_error import quoted
from onnxpar.serve.body import Fields

_MOST_TOOLS = 128
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a function that says nothing of them."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


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


def functions_of(fields: Fields, is_flat: bool) -> list[dict[str, Any]]:
    """Returns the functions of a request as objects with a name and parameters. Errors: ApiError.

    is_flat  True if a tool is itself the function, as in /v1/responses
    """
    found = fields.array("tools") or []
    if len(found) > _MOST_TOOLS:
        fields.refuse("tools", f"has {len(found)} functions; at most {_MOST_TOOLS} are allowed")
    functions = [_function(fields, at, tool, is_flat) for at, tool in enumerate(found)]
    names = [function["name"] for function in functions]
    for name in names:
        if names.count(name) > 1:
            fields.refuse("tools", f"has two functions {quoted(name)}; rename one")
    return functions


def _function(fields: Fields, at: int, found: object, is_flat: bool) -> dict[str, Any]:
    tool = fields.item("tools", at, found)
    kind = tool.text("type")
    if kind != "function":
        tool.refuse("type", f"is {quoted(kind)}; the model calls tools of type function")
    function = tool if is_flat else tool.inner("function")
    if function is None:
        tool.refuse("function", "is missing; give an object with a name and parameters")
    name = function.text("name")
    if name is None or not _NAME.fullmatch(name):
        function.refuse("name", f"is {quoted(name)}; give 1 to 64 letters, digits and _ . -")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        function.refuse("parameters", f"must be a JSON schema, not {quoted(parameters)}")
    if (parameters or {}).get("type", "object") != "object":
        function.refuse("parameters", "must be the JSON schema of an object")
    given = {"name": name, "description": function.text("description"), "parameters": parameters}
    return {member: value for member, value in given.items() if value is not None}


def tools_of(fields: Fields, functions: Sequence[Mapping[str, Any]]) -> Tools | None:
    """Returns what an answer may call, of the functions that there are; None: nothing. Errors:
    ApiError."""
    is_parallel = fields.flag("parallel_tool_calls", default=True)
    parameters = {each["name"]: each.get("parameters") or _NOTHING for each in functions}
    choice = fields.get("tool_choice")
    if choice in (None, "none", "auto"):
        return Tools(parameters, False, is_parallel) if functions and choice != "none" else None
    if choice == "required":
        if not functions:
            fields.refuse("tool_choice", "is 'required', and there are no tools; give some")
        return Tools(parameters, True, is_parallel)
    if not isinstance(choice, dict) or choice.get("type") != "function":
        fields.refuse(
            "tool_choice", f"is {quoted(choice)}; it must be none, auto, required or a function"
        )
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
    if not isinstance(name, str) or name not in parameters:
        fields.refuse("tool_choice", f"names {quoted(name)}, which is none of the tools")
    return Tools({name: parameters[name]}, True, False)


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
