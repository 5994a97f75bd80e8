"""Reads the JSON object that a request sends, and its fields, each of its type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from starlette.types import Receive

from onnxpar.serve.api_error import ApiError, quoted

_WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "prediction", "prompt_cache_key"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
    }
)
"""Fields of OpenAI that change no answer here."""
_MOST_DIGITS = 20
"""Digits of a whole number; no field has a larger one."""


class Gone(Exception):
    """The client has closed the connection."""


async def read_body(receive: Receive, most: int) -> bytes:
    """Returns the bytes of a request. Errors: ApiError if they are more than `most`; Gone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise ApiError(f"the request is larger than {most} bytes", 413, code="too_large")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def fields_of(body: bytes) -> Fields:
    """Returns the fields of a request. Errors: ApiError if it is not a JSON object."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse, parse_int=_whole)
    except RecursionError:
        raise ApiError("the request is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(f"the request is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError("the request must be a JSON object", code="invalid_json")
    return Fields(found)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else math.inf


class Fields:
    """The fields of a JSON object. One that is null counts as left out. Errors: ApiError for a
    value of another type, or out of its range.

    where  the name of the object, in front of those of its fields; empty: that of the request
    """

    def __init__(self, found: Mapping[str, Any], where: str = "") -> None:
        self._found, self.where = found, where
        self._asked = set(_WITHOUT_EFFECT)

    def get(self, name: str) -> Any:
        """Returns a value as it is; None if there is none."""
        self._asked.add(name)
        return self._found.get(name)

    def refuse_others(self) -> None:
        """Errors: ApiError if there is a field that nothing has asked for: it may be misspelt, or
        ask for what is not there."""
        for name, value in self._found.items():
            if value is not None and name not in self._asked:
                known = get_close_matches(name, self._asked, 1)
                hint = f"; {quoted(known[0])} is" if known else "; leave it out"
                raise ApiError(
                    f"{quoted(name)} is not a field of this request{hint}",
                    param=self.where + name,
                    code="unknown_field",
                )

    def refuse(self, name: str, why: str, code: str | None = None) -> NoReturn:
        """Raises the error of a field: `why` goes behind its name."""
        param = self.where + name
        raise ApiError(f"{param} {why}", param=param, code=code)

    def text(self, name: str) -> str | None:
        """Returns a string; None if there is none."""
        value = self.get(name)
        return None if value is None else self.valid_text(name, value)

    def valid_text(self, name: str, value: object) -> str:
        """Returns a value of a field if it is a string of valid Unicode."""
        if not isinstance(value, str):
            self.refuse(name, f"must be a string, not {quoted(value)}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            self.refuse(name, "has half of a surrogate pair, which is no character")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Returns a number in a range."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, f"must be a number, not {quoted(value)}")
        if not least <= value <= most:
            self.refuse(name, f"is {quoted(value)}; it must be from {least:g} to {most:g}")
        return float(value)

    def whole(self, name: str, least: int, most: int) -> int | None:
        """Returns a whole number in a range; None if there is none."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1:
            self.refuse(name, f"must be a whole number, not {quoted(value)}")
        if not least <= value <= most:
            self.refuse(name, f"is {quoted(value)}; it must be from {least} to {most}")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, f"must be true or false, not {quoted(value)}")
        return value

    def inner(self, name: str) -> Fields | None:
        """Returns the fields of an object; None if there is none."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, f"must be an object, not {quoted(value)}")
        return Fields(value, f"{self.where}{name}.")

    def item(self, name: str, at: int, found: object) -> Fields:
        """Returns the fields of an object in an array."""
        if not isinstance(found, dict):
            self.refuse(f"{name}[{at}]", f"must be an object, not {quoted(found)}")
        return Fields(found, f"{self.where}{name}[{at}].")

    def array(self, name: str) -> Sequence[Any] | None:
        """Returns an array; None if there is none."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            self.refuse(name, f"must be an array, not {quoted(value)}")
        return value
