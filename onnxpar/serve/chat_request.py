"""Requests for answers in a chat: the fields that all of them have, and requests of
/v1/chat/completions."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Json, TypeAdapter

from onnxpar.base.errors import InputError
from onnxpar.llm.chat_template import GIVEN
from onnxpar.llm.messages import Messages
from onnxpar.serve.api_error import ApiError, quote
from onnxpar.serve.generation_request import GenerationRequest, TopLogprobs
from onnxpar.serve.request import Array, Filled, Part, Whole, refuse, unsupported
from onnxpar.serve.service import GeneratingService
from onnxpar.serve.tools import Tools, with_ids

_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without `parameters`: it has none."""


class Function(Part):
    """A function that answers may call: its name, and the JSON schema of its parameters."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def check(self, service: Any) -> None:
        if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", self.name):
            refuse("name", f"is {quote(self.name)}; give 1 to 64 letters, digits and _ . -")
        if (self.parameters or {}).get("type", "object") != "object":
            refuse("parameters", "must be the JSON schema of an object")


class Tool(Part):
    """A tool of a request. OpenAI has other types, too; here all tools are functions."""

    type: Literal["function"]


class ChatTool(Tool):
    """A tool of /v1/chat/completions, whose members are in an inner object."""

    function: Function


class FlatTool(Function, Tool):
    """A tool of /v1/responses, which is a function itself. The response repeats all its members,
    also unknown ones."""

    model_config = ConfigDict(extra="allow")

    @property
    def function(self) -> Function:
        """The tool itself, which is also its function."""
        return self


def _chosen(choice: Mapping[str, Any]) -> Any:
    """Returns the name of the function that an answer must call, by the field `tool_choice`."""
    inner = choice.get("function")
    return inner.get("name") if isinstance(inner, dict) else choice.get("name")


class DialogRequest(GenerationRequest):
    """A request with a chat, which the model's chat template turns into text, and with tools."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field({})
    tools: Sequence[ChatTool | FlatTool] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True

    def check(self, service: Any) -> None:
        """Refuses options of the chat template and choices of tools that contradict each other."""
        super().check(service)
        if self.continue_final_message and self.add_generation_prompt:
            refuse("continue_final_message", "begins no answer: leave add_generation_prompt out")
        for name in GIVEN:
            if self.chat_template_kwargs.get(name) is not None:
                refuse(f"chat_template_kwargs.{name}", "is no option of the template; leave it out")
        names = [tool.function.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                refuse("tools", f"has two functions {quote(name)}; rename one")
        choice = self.tool_choice
        if choice == "required" and not names:
            refuse("tool_choice", "is 'required', and there are no tools; give some")
        if choice in ("none", "auto", "required"):
            return
        if not isinstance(choice, dict) or choice.get("type") != "function":
            one_of = "none, auto, required or a function"
            refuse("tool_choice", f"is {quote(choice)}; it must be {one_of}")
        if _chosen(choice) not in names:
            refuse("tool_choice", f"names {quote(_chosen(choice))}, which is none of the tools")

    @property
    def _functions(self) -> list[Function]:
        """The functions that answers may call."""
        return [tool.function for tool in self.tools if self.tool_choice != "none"]

    @property
    @abstractmethod
    def chat(self) -> Messages:
        """The messages in the form that templates read."""

    def tokens(self, service: GeneratingService) -> Sequence[Sequence[int]]:
        """Returns the tokens of the chat, in a list. Errors: ApiError if the model has no chat
        template, or the template refuses the messages."""
        tokenizer, messages = service.engine.tokenizer, self.chat
        if not tokenizer.has_chat:
            text = "the model has no chat template; use /v1/completions"
            raise ApiError(text, param="messages", code="no_chat_template")
        if service.family is not None and service.family.ids:
            messages = with_ids(messages, service.family.ids)
        begins, members = self.add_generation_prompt, {"name", "description", "parameters"}
        tools = [f.model_dump(include=members, exclude_none=True) for f in self._functions]
        try:
            ids = tokenizer.chat(
                messages,
                self.add_special_tokens,
                tools=[{"type": "function", "function": tool} for tool in tools],
                add_generation_prompt=not self.continues if begins is None else begins,
                continue_final_message=self.continues,
                others=self.chat_template_kwargs,
            )
        except InputError as error:
            raise ApiError(str(error), param="messages") from None
        return [ids]

    @property
    def continues(self) -> bool:
        return self.continue_final_message

    @property
    def callable_tools(self) -> Tools | None:
        parameters = {
            function.name: function.parameters or _NOTHING for function in self._functions
        }
        if isinstance(self.tool_choice, dict):
            name = _chosen(self.tool_choice)
            return Tools({name: parameters[name]}, True, False)
        is_required = self.tool_choice == "required"
        return Tools(parameters, is_required, self.parallel_tool_calls) if parameters else None


class TextPart(Part):
    """A part of a message's content: a text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


_PARTS = TypeAdapter(Array[TextPart])


def _joined(content: object) -> object:
    """Returns the texts of a list of parts, joined by line breaks; any other content as it is."""
    if not isinstance(content, list):
        return content
    return "\n".join(part.text for part in _PARTS.validate_python(content))


Text = Annotated[str, BeforeValidator(_joined)]
"""A text, as one string or as an array of parts."""


_Arguments = Annotated[Json[dict[str, Any]], BeforeValidator(lambda v: "{}" if v == "" else v)]


class CalledFunction(Part):
    """The function that an assistant's message calls, with its arguments, read from their JSON
    text."""

    name: str
    arguments: _Arguments = Field({})


class ToolCall(Part):
    """A call of a tool in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Part):
    """A message of a chat, with the members that chat templates read."""

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: Text | None = None
    tool_calls: Annotated[Array[ToolCall] | None, AfterValidator(lambda v: v or None)] = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    reasoning: str | None = None

    def check(self, service: Any) -> None:
        if self.tool_calls and self.role != "assistant":
            refuse("tool_calls", f"is of role {self.role}; only assistants call tools")
        if self.content is None and not self.tool_calls:
            refuse("content", "is missing; give a text")

    @property
    def as_read(self) -> dict[str, Any]:
        """The message in the form that chat templates read."""
        role = "system" if self.role == "developer" else self.role
        return {"content": None, **self.model_dump(exclude_none=True), "role": role}


FormatType = Literal["text", "json_object", "json_schema"]


def schema_of(kind: FormatType, schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns the JSON schema that answers of a format must fit; None if any text is allowed."""
    return {"text": None, "json_object": {"type": "object"}, "json_schema": schema}[kind]


class JsonSchema(Part):
    """The JSON schema of a format."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Part):
    """The field `response_format`: text, any JSON object, or JSON of a schema."""

    type: FormatType
    json_schema: JsonSchema | None = None

    def check(self, service: Any) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            refuse("json_schema", "is missing; give an object with a schema")


class ChatCompletionRequest(DialogRequest):
    """A request of /v1/chat/completions."""

    length_fields: ClassVar[Sequence[str]] = ("max_completion_tokens", "max_tokens")

    messages: Filled[Message]
    tools: Array[ChatTool] = Field([], max_length=128)
    functions: Annotated[Any, unsupported("give tools", [], "none", "auto")] = None
    function_call: Annotated[Any, unsupported("give tool_choice", [], "none", "auto")] = None
    modalities: Annotated[Any, unsupported("the model writes text", [], ["text"])] = None
    audio: Annotated[Any, unsupported("the model writes text")] = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    max_completion_tokens: Whole | None = Field(None, ge=1, le=2**31)
    max_tokens: Whole | None = Field(None, ge=1, le=2**31)
    response_format: ResponseFormat = ResponseFormat(type="text")

    def check(self, service: Any) -> None:
        super().check(service)
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "needs logprobs: true")

    @property
    def chat(self) -> Messages:
        return [message.as_read for message in self.messages]

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        json_schema = self.response_format.json_schema
        return schema_of(
            self.response_format.type, None if json_schema is None else json_schema.schema_
        )
