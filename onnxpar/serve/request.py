"""Reads the JSON of requests into objects, with pydantic, and refuses wrong fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from onnxpar.serve.api_error import ApiError, json_bytes, quote
from onnxpar.serve.service import Service
from onnxpar.serve.settings import Settings


def _served(name: str, info: Any) -> str:
    """Checks the field `model` of a request. Errors: ApiError if this server does not serve the
    model."""
    if name != info.context.settings.model_name:
        raise unknown_model(name, info.context.settings)
    return name


def unknown_model(name: str, settings: Settings) -> ApiError:
    """Returns the error for a model that this server does not serve."""
    text = f"there is no model {quote(name)}; this server has {settings.model_name!r}"
    return ApiError(text, 404, param="model", code="model_not_found")


class Part(BaseModel):
    """An object in a request, of whatever depth. A member that is null counts as missing."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: member for name, member in value.items() if member is not None}

    @model_validator(mode="after")
    def _checked(self, info: Any) -> Part:
        """Calls `check` with the service, once all members are valid."""
        self.check(info.context)
        return self

    def check(self, service: Any) -> None:
        """Refuses (by `refuse`) members that contradict each other, or that exceed the limits of
        `service`. Does nothing here."""


class Request(Part):
    """A request. Unknown fields are refused, as they may be misspelt. The fields here, except for
    `model`, are accepted but change no answer."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str | None, AfterValidator(_served)] = None
    metadata: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None


R = TypeVar("R", bound=Request)


def object_of(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in the body of a request. Errors: ApiError if the body is not a JSON
    object."""
    try:
        value = from_json(body, allow_inf_nan=False)
        json_bytes(value)  # refuses numbers beyond the range of floats, such as 1e999
    except ValueError as error:
        raise ApiError(f"the request is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError("the request must be a JSON object", code="invalid_json")
    return value


def read_request(kind: type[R], members: Mapping[str, Any], service: Service) -> R:
    """Returns the request of class `kind` with these members, checked against the limits of the
    service. Errors: ApiError for wrong members."""
    try:
        return kind.model_validate(members, context=service)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], kind) from None


def _refusal(error: ErrorDetails, request: type[Request]) -> ApiError:
    """Returns the error for a client, from an error of pydantic for a request of this class."""
    kind, place, is_key = error["type"], error["loc"], error["loc"][-1] == "[key]"
    is_within = is_key or (isinstance(place[-1], int) and kind != "model_type")
    if is_within:
        place = place[: -2 if is_key else -1]
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place)[1:]
    if kind == "extra_forbidden":
        known = get_close_matches(param, request.model_fields, 1)
        hint = f"{quote(known[0])} is" if known else "leave it out"
        text = f"{quote(param)} is not a field of this request; {hint}"
        return ApiError(text, param=param, code="unknown_field")
    if kind == "missing":
        return ApiError(f"{param} is missing; add it", param=param)
    if kind == "value_error":
        return ApiError(f"{param} {error['ctx']['error']}", param=param)
    should = re.sub(r"^\w+ should", "it should", error["msg"]).replace(" after validation", "")
    should = re.sub("a valid dictionary.*", "an object", should)
    if kind.startswith("json"):
        should = "it should be the JSON text of an object"
    verb = "has" if is_within else "is"
    return ApiError(f"{param} {verb} {quote(error['input'])}; {should}", param=param)


def refuse(name: str, why: str) -> NoReturn:
    """Raises the error that member `name` of the object that is being checked is wrong. `why`
    continues the sentence that begins with the name: "needs logprobs: true"."""
    kind = PydanticCustomError("value_error", "{error}", {"error": why})
    raise ValidationError.from_exception_data(name, [{"type": kind, "loc": (name,), "input": None}])


def unsupported(remedy: str, *harmless: object) -> AfterValidator:
    """Returns a validator of a field that this server does not support: it refuses all values but
    the `harmless` ones, which change no answer. `remedy` is the end of the message."""

    def check(value: object) -> object:
        if value not in harmless:
            raise ValueError(f"is not supported; {remedy}")
        return value

    return AfterValidator(check)


T = TypeVar("T")
Array = Annotated[list[T], Field(fail_fast=True)]
"""A list; an error is about the first wrong item."""
Filled = Annotated[list[T], Field(fail_fast=True, min_length=1)]
_TEXTS = TypeAdapter[Any](str | Filled[int] | Filled[str] | Filled[Array[int]])


def _read_texts(value: object) -> list[Any]:
    """Returns a list of texts or lists of token ids, from any of the forms that `Texts` allows."""
    try:
        texts = _TEXTS.validate_python(value, strict=True)
    except ValidationError:
        raise ValueError("must be a text, token ids, or a list of either, and not empty") from None
    return [texts] if isinstance(texts, str) or isinstance(texts[0], int) else texts


Texts = Annotated[list[str | list[int]], BeforeValidator(_read_texts)]
"""A list of texts or of lists of token ids; a single text, or a single list of ids, needs no list
around it."""
Whole = Annotated[int, BeforeValidator(lambda v: int(v) if type(v) is float and v % 1 == 0 else v)]
"""A whole number, which JSON may write as 1.0."""
