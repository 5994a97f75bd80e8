"""Reads requests of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxpar.llm.chat_template import GIVEN, THOUGHTS
from onnxpar.serve.api_error import quoted
from onnxpar.serve.body import Fields
from onnxpar.serve.settings import Settings
from onnxpar.serve.wanted import MOST_LOGPROBS, Wanted, check_model, common, max_tokens

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of messages, as chat templates call them."""


def chat_request(fields: Fields, settings: Settings) -> Wanted:
    """Returns what a request wants. Errors: ApiError."""
    check_model(fields, settings)
    _refuse_unsupported(fields)
    messages = messages_of(fields)
    top = fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    wants_logprobs = fields.flag("logprobs")
    if top is not None and not wants_logprobs:
        fields.refuse("top_logprobs", "needs logprobs: true")
    names = ("max_completion_tokens", "max_tokens")
    most = [max_tokens(fields, name, settings) for name in names]
    return Wanted(
        prompts=[messages],
        max_tokens=most[1] if most[0] is None else most[0],
        logprobs=(top or 0) if wants_logprobs else None,
        schema=_schema(fields),
        chat=template_options(fields),
        **common(fields, settings, 1),
    )


def _refuse_unsupported(fields: Fields) -> None:
    """Errors: ApiError for what would change an answer, and is not there."""
    for name in ("tools", "functions"):
        if fields.array(name):
            fields.refuse(name, "is not supported; leave it out")
    for name in ("tool_choice", "function_call"):
        if fields.get(name) not in (None, "none", "auto"):
            fields.refuse(name, "is not supported; leave it out")
    for kind in fields.array("modalities") or ():
        if kind != "text":
            fields.refuse("modalities", f"has {quoted(kind)}; the model writes text")
    if fields.get("audio") is not None:
        fields.refuse("audio", "is not supported; the model writes text")


def messages_of(fields: Fields) -> list[dict[str, str]]:
    """Returns the messages of the chat, with one text each, and what else templates read."""
    found = fields.array("messages")
    if not found:
        fields.refuse("messages", "is missing or empty; give at least one message")
    return [_message(fields, at, each) for at, each in enumerate(found)]


def _message(fields: Fields, at: int, found: object) -> dict[str, str]:
    name = f"messages[{at}]"
    if not isinstance(found, dict):
        fields.refuse(name, f"must be an object, not {quoted(found)}")
    message = Fields(found, f"{name}.")
    role = message.text("role")
    if role not in _ROLES:
        message.refuse("role", f"is {quoted(role)}; it must be one of {', '.join(_ROLES)}")
    if message.get("tool_calls"):
        message.refuse("tool_calls", "is not supported; leave it out")
    texts = {"role": _ROLES[role], "content": _content(message)}
    others = {member: message.text(member) for member in ("name", *THOUGHTS)}
    return texts | {member: text for member, text in others.items() if text is not None}


def _content(message: Fields) -> str:
    """The text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(_part(message, index, part) for index, part in enumerate(content))
    if content is None:
        message.refuse("content", "is missing; give a text")
    return message.valid_text("content", content)


def _part(message: Fields, at: int, found: object) -> str:
    """The text of a part of a message."""
    name = f"content[{at}]"
    if not isinstance(found, dict) or found.get("type") != "text":
        message.refuse(name, "is no text; the model reads parts of type text")
    return message.valid_text(name, found.get("text"))


def template_options(fields: Fields) -> dict[str, Any]:
    """Returns what the chat template is given besides the messages."""
    is_continued = fields.flag("continue_final_message")
    begins = fields.flag("add_generation_prompt", default=not is_continued)
    if is_continued and begins:
        fields.refuse("continue_final_message", "begins no answer: leave add_generation_prompt out")
    others = fields.inner("chat_template_kwargs")
    for name in GIVEN:
        if others is not None and others.get(name) is not None:
            others.refuse(name, "is no option of the template; leave it out")
    return {
        "specials": fields.flag("add_special_tokens"),
        "add_generation_prompt": begins,
        "continue_final_message": is_continued,
        "others": fields.get("chat_template_kwargs") or {},
    }


def _schema(fields: Fields) -> Mapping[str, Any] | None:
    """The JSON schema that answers must fit."""
    form = fields.inner("response_format")
    if form is None:
        return None
    kind = form.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        form.refuse("type", f"is {quoted(kind)}; it must be text, json_object or json_schema")
    inner = form.inner("json_schema")
    schema = None if inner is None else inner.get("schema")
    if not isinstance(schema, dict):
        form.refuse("json_schema", "has no schema; give an object")
    return schema
