"""Reads requests of /v1/responses."""

from __future__ import annotations

from typing import Any

from onnxpar.serve.api_error import quoted
from onnxpar.serve.body import Fields
from onnxpar.serve.chat_request import called, message_of, schema_of, template_options, text_of
from onnxpar.serve.settings import Settings
from onnxpar.serve.tools import functions_of, tools_of
from onnxpar.serve.wanted import Wanted, check_model, common, max_tokens

_HARMLESS = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "n": (1,),
    "previous_response_id": (),
    "store": (False,),
    "truncation": ("disabled",),
}
"""Fields that are not supported, with the values that change nothing."""
_INSTEAD = {
    "previous_response_id": "send the whole conversation as input",
    "store": "no response is stored: send false",
    "truncation": "send a shorter input",
}


def responses_request(fields: Fields, settings: Settings) -> Wanted:
    """Returns what a request wants. Errors: ApiError."""
    check_model(fields, settings)
    _refuse_unsupported(fields)
    functions = functions_of(fields, is_flat=True)
    tools = tools_of(fields, functions)
    text = fields.inner("text")
    form = None if text is None else text.inner("format")
    return Wanted(
        prompts=[_messages(fields)],
        max_tokens=max_tokens(fields, "max_output_tokens", settings),
        logprobs=None,
        schema=schema_of(form, is_flat=True),
        schema_field="text.format",
        chat=template_options(fields, functions if tools else ()),
        tools=tools,
        repeated=_repeated(fields),
        **common(fields, settings, 1),
    )


def _refuse_unsupported(fields: Fields) -> None:
    """Errors: ApiError for what would change an answer, and is not there."""
    for name, values in _HARMLESS.items():
        value = fields.get(name)
        if value is not None and value not in values:
            fields.refuse(name, f"is not supported; {_INSTEAD.get(name, 'leave it out')}")
    for name, members in (("reasoning", ("effort", "summary")), ("text", ("verbosity",))):
        inner = fields.inner(name)
        for member in members:
            if inner is not None and inner.get(member) is not None:
                inner.refuse(member, "is not supported; leave it out")


def _repeated(fields: Fields) -> dict[str, Any]:
    """What the response says of its request."""
    defaults: dict[str, Any] = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
    }
    given = {name: fields.get(name) for name in defaults}
    return defaults | {name: value for name, value in given.items() if value is not None}


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """The chat of a request: its instructions, which join those of the input, and the input."""
    found = fields.get("input")
    if not found:
        fields.refuse("input", "is missing or empty; give a text or a list of items")
    if not isinstance(found, list):
        messages = [{"role": "user", "content": fields.valid_text("input", found)}]
    else:
        messages = []
        for at, item in enumerate(found):
            _add(messages, fields.item("input", at, item))
    instructions = fields.text("instructions")
    if instructions is None:
        return messages
    if messages[0]["role"] == "system":
        instructions += f"\n\n{messages.pop(0)['content']}"
    return [{"role": "system", "content": instructions}, *messages]


def _add(messages: list[dict[str, Any]], item: Fields) -> None:
    """Adds an item of the input to a chat."""
    kind = item.text("type") or "message"
    if kind == "message":
        messages.append(message_of(item))
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        call = called(item.text("call_id"), item)
        messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), call]
    elif kind == "function_call_output":
        told = {"role": "tool", "content": text_of(item, "output")}
        messages.append({**told, "tool_call_id": item.text("call_id") or ""})
    else:
        item.refuse(
            "type",
            f"is {quoted(kind)}; the model reads message, function_call and function_call_output",
        )
