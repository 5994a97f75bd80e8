"""Requests of /v1/responses, OpenAI's newer form of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator

from onnxpar.llm.messages import Messages
from onnxpar.serve.chat_request import (
    CalledFunction,
    DialogRequest,
    FlatTool,
    FormatType,
    Message,
    Text,
    ToolCall,
    schema_of,
)
from onnxpar.serve.request import Array, Part, Whole, refuse, unsupported

_REPEATED = {
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature"),
    *("text", "tool_choice", "tools", "top_p"),
}
"""Fields of the request that the response repeats."""
_Unsupported = Annotated[Any, unsupported("leave it out")]


class FunctionCall(CalledFunction):
    """An item of the input: an earlier call of a tool."""

    call_id: str = ""


class FunctionCallOutput(Part):
    """An item of the input: the result of an earlier call of a tool."""

    call_id: str = ""
    output: Text


class _Kind(Part):
    """The type of an item of the input, read before its other members."""

    type: Literal["message", "function_call", "function_call_output"] = "message"


def _read_item(value: object) -> Message | FunctionCall | FunctionCallOutput:
    """Returns the item of the input that a value is, by its type."""
    kind = _Kind.model_validate(value).type
    if kind == "message":
        return Message.model_validate(value)
    return (FunctionCall if kind == "function_call" else FunctionCallOutput).model_validate(value)


Item = Annotated[Message | FunctionCall | FunctionCallOutput, PlainValidator(_read_item)]


def _read_input(value: object) -> object:
    """Returns the items of the input; a text is a message of the user."""
    if not value or not isinstance(value, (str, list)):
        raise ValueError("must be a text or a list of items, and not empty")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class FlatFormat(Part):
    """The format of an answer. The response repeats all its members, also unknown ones."""

    model_config = ConfigDict(extra="allow")

    type: FormatType
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    def check(self, service: Any) -> None:
        if self.type == "json_schema" and self.schema_ is None:
            refuse("schema", "is missing; give an object")


class TextOptions(Part):
    """The field `text`: the format of the answer."""

    format: FlatFormat = FlatFormat.model_validate({"type": "text"})
    verbosity: _Unsupported = None


class Reasoning(Part):
    """The field `reasoning`, whose members are not supported."""

    effort: _Unsupported = None
    summary: _Unsupported = None


class ResponsesRequest(DialogRequest):
    """A request of /v1/responses."""

    schema_field: ClassVar[str] = "text.format"
    length_fields: ClassVar[Sequence[str]] = ("max_output_tokens",)

    input: Annotated[
        Array[Annotated[Item, PlainValidator(_read_item)]], BeforeValidator(_read_input)
    ]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1, le=2**31)
    metadata: Any = Field({})
    text: TextOptions = TextOptions()
    tools: Array[FlatTool] = Field([], max_length=128)
    background: Annotated[Any, unsupported("leave it out", False)] = None
    include: Annotated[Any, unsupported("leave it out", [], ["reasoning.encrypted_content"])] = None
    n: Whole = Field(1, ge=1, le=1)
    previous_response_id: Annotated[Any, unsupported("send the whole conversation as input")] = None
    reasoning: Reasoning | None = None
    store: Annotated[Any, unsupported("no response is stored: send false", False)] = None
    truncation: Annotated[Any, unsupported("send a shorter input", "disabled")] = None

    @property
    def chat(self) -> Messages:
        """The messages of the input in the form that chat templates read. The instructions come
        first, as a system message; one of the input is joined to them."""
        messages: list[dict[str, Any]] = []
        for item in self.input:
            _add(messages, item)
        instructions = self.instructions
        if instructions is None:
            return messages
        if messages[0]["role"] == "system":
            instructions += f"\n\n{messages.pop(0)['content']}"
        return [{"role": "system", "content": instructions}, *messages]

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        return schema_of(self.text.format.type, self.text.format.schema_)

    @property
    def repeated(self) -> dict[str, Any]:
        """The members of the request that the response repeats, as JSON."""
        members = self.model_dump(include=_REPEATED, by_alias=True, exclude_none=True)
        return {"instructions": None, "max_output_tokens": None, **members}


def _add(messages: list[dict[str, Any]], item: Part) -> None:
    """Adds an item of the input to the messages of a chat: a call becomes part of the assistant's
    last message."""
    if isinstance(item, Message):
        messages.append(item.as_read)
    elif isinstance(item, FunctionCallOutput):
        messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
    elif isinstance(item, FunctionCall):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        call = ToolCall(id=item.call_id, function=item).model_dump()
        messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), call]
