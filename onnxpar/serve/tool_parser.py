"""Finds calls of tools in the text of an answer, as it comes, piece by piece."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping
from typing import Any

from onnxpar.llm.stop_strings import longest_beginning
from onnxpar.serve.answer_parts import CallArguments, CallBegin, CallEnd, Part, Text
from onnxpar.serve.call_values import json_value, python_value, text_value
from onnxpar.serve.pieced_text import PiecedText, Reading, UnexpectedText
from onnxpar.serve.tool_families import ToolFamily

_LONGEST_HEADER = 256
"""Most characters between a marker and the arguments of a call."""
_ARGUMENTS = ("arguments", "parameters")
_ID, _ID_LENGTH = string.ascii_letters + string.digits, 9
"""The characters and the length of ids, as Mistral's templates require them."""


class ToolParser:
    """Splits the text of an answer into content and calls of tools; white space around calls is
    dropped.

    family     how the model writes calls
    functions  the JSON schemas of the functions' parameters, by name; a call without a marker must
               name one of them
    """

    def __init__(self, family: ToolFamily, functions: Mapping[str, Mapping[str, Any]]) -> None:
        self._family, self._functions = family, functions
        self._markers = re.compile("|".join(map(re.escape, family.begins)) or r"(?!)")
        self.calls = 0
        """The number of calls that are well-formed."""
        self._index = 0
        self._text = PiecedText()
        self._parts: list[Part] = []
        self._raw = 0
        """The beginning of the text of an unfinished call, or of the text after the last call."""
        self._sent: int | None = None
        """The end of the arguments that were sent, while arguments are being read."""
        self._arguments: str | None = None
        """The arguments of a call in JSON, once they are complete."""
        self._before = "{"
        """The text before the next argument, where arguments are sent one by one."""
        self._is_open = False
        """True once the name of a call is complete."""
        self._is_marked = False
        self._may_be_bare = family.is_bare
        self._is_cut = False
        self._is_behind = False
        """True if the last part was a call."""
        self._reading = self._read()

    def add(self, text: str, is_last: bool = False, is_cut: bool = False) -> list[Part]:
        """Adds a piece of text; returns the parts that are complete now.

        is_last  True for the last piece
        is_cut   True if the text ends too early: an unfinished call at its end then stays a call
        """
        self._text.text += text
        self._is_cut = is_cut
        self._text.is_complete = is_last
        next(self._reading, None)
        self._send_arguments()
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Reading[None]:
        """Reads the whole text: content, and calls."""
        while (yield from self._find()):
            try:
                yield from self._calls()
                self._is_behind, self._may_be_bare = True, self._family.is_bare
            except UnexpectedText:
                self._give_up()

    def _find(self) -> Reading[bool]:
        """Reads the content up to the next call, and the marker of the call; returns False at the
        end of the text."""
        text = self._text
        self._raw = text.at
        if self._is_behind:
            yield from self._skip_ends()
        if self._may_be_bare:
            char = yield from text.visible()
            self._is_marked = False
            if char and char in "{[":
                return True
        if self._is_behind and not (yield from text.visible()):
            return False
        text.at = self._raw
        return (yield from self._content())

    def _skip_ends(self) -> Reading[None]:
        """Skips the markers after a call."""
        while True:
            yield from self._text.visible()
            if (yield from self._text.one_of(self._family.ends)) is None:
                return
            self._raw = self._text.at

    def _content(self) -> Reading[bool]:
        """Sends content up to a place where a marker may begin, again and again. Returns True after
        a marker, False at the end of the text."""
        text = self._text
        while True:
            text.text, text.at = text.text[text.at :], 0
            marker = self._markers.search(text.text)
            end = marker.start() if marker else len(text.text)
            if not text.is_complete and not marker:
                end -= longest_beginning(text.text, self._family.begins)
            if marker or not text.is_complete:
                end = len(text.text[:end].rstrip())  # white space may come before a call
            self._send(text.text[:end])
            self._raw = text.at = end
            if marker:
                text.at, self._is_marked = marker.end(), True
                return True
            if text.is_complete:
                return False
            yield

    def _send(self, text: str) -> None:
        """Adds text to the content, if there is any."""
        if text:
            self._parts.append(Text(text))
            self._may_be_bare = self._is_behind = False

    def _calls(self) -> Reading[None]:
        """Reads what follows a marker: a call, or a list of calls, in the form of the model's
        family."""
        text = self._text
        char = yield from text.visible()
        while (yield from text.one_of(self._family.begins)):
            char = yield from text.visible()
        if char == "[":
            yield from text.take("[")
            yield from self._call()
            while (yield from text.take(",]")) == ",":
                yield from self._call()
        elif char == "{" or not self._family.header:
            yield from self._json_call()
        else:
            yield from self._named_call()
        self._raw = text.at

    def _call(self) -> Reading[None]:
        """Reads a call within a list, as JSON or Python."""
        is_json = (yield from self._text.visible()) == "{"
        yield from self._json_call() if is_json else self._python_call()

    def _json_call(self) -> Reading[None]:
        """Reads a call that is a JSON object."""
        yield from self._members()
        if not self._is_open:
            raise UnexpectedText
        if self._arguments is None:
            self._parts.append(CallArguments(self._index, "{}"))
        self._end()

    def _members(self, is_inner: bool = False) -> Reading[None]:
        """Reads the members of a JSON object that is a call, or of the inner object `function` of a
        call."""
        text = self._text
        yield from text.take("{")
        while True:
            key = yield from self._string()
            yield from text.take(":")
            if key == "name":
                self._begin((yield from self._string()))
            elif key in _ARGUMENTS:
                yield from self._json_arguments()
            elif key == "function" and not is_inner and (yield from text.visible()) == "{":
                yield from self._members(is_inner=True)
            elif key in ("type", "id"):
                yield from text.value()
            else:
                raise UnexpectedText
            if (yield from text.take(",}")) == "}":
                return

    def _string(self) -> Reading[str]:
        """Reads and returns a JSON string."""
        if (yield from self._text.visible()) != '"':
            raise UnexpectedText
        return json_value((yield from self._text.value()), str)

    def _named_call(self) -> Reading[None]:
        """Reads a call whose name comes before its arguments, by the family's `header`."""
        text, start = self._text, self._text.at
        opening = "<" if self._family.argument else "{"
        while (char := (yield from text.next())) != opening:
            if not char or text.at - start > _LONGEST_HEADER:
                raise UnexpectedText
            text.at += 1
        header = re.fullmatch(self._family.header, text.text[start : text.at])
        if header is None:
            raise UnexpectedText
        name = header[header.lastindex or 0]
        self._begin(name)
        yield from self._text_arguments(name) if self._family.argument else self._json_arguments()
        self._end()

    def _json_arguments(self) -> Reading[None]:
        """Reads arguments in JSON, and sends them as they come. Arguments that come before the
        call's name are sent after it."""
        text = self._text
        if self._arguments is not None or (yield from text.visible()) != "{":
            raise UnexpectedText
        self._sent = text.at if self._is_open else None
        self._arguments = yield from text.value()
        self._send_arguments()
        self._sent = None
        json_value(self._arguments, dict)

    def _text_arguments(self, name: str) -> Reading[None]:
        """Reads the arguments of the function `name`, whose values are plain texts."""
        assert self._family.argument is not None, "other arguments are JSON"
        begin, pattern, end = self._family.argument
        options = (begin, *self._family.ends)
        while (yield from self._text.expect(options)) == begin:
            argument = re.fullmatch(pattern, (yield from self._text.until(end)), re.DOTALL)
            if argument is None:
                raise UnexpectedText
            self._add(
                argument[1], text_value(argument[2], argument[1], self._functions.get(name, {}))
            )
        self._close()

    def _python_call(self) -> Reading[None]:
        """Reads a call as Python writes it: name(key=value, ...)."""
        text = self._text
        name = yield from text.word()
        yield from text.take("(")
        self._begin(name)
        while (yield from text.visible()) != ")":
            key = yield from text.word()
            yield from text.take("=")
            self._add(key, python_value((yield from text.value(quotes="\"'"))))
            if (yield from text.visible()) != ")":
                yield from text.take(",")
        yield from text.take(")")
        self._close()
        self._end()

    def _add(self, key: str, value: str) -> None:
        """Sends the argument `key` of a call whose arguments are sent one by one; `value` is
        JSON."""
        new = f"{self._before}{json.dumps(key)}: {value}"
        self._parts.append(CallArguments(self._index, new))
        self._before = ", "

    def _close(self) -> None:
        """Sends the end of arguments that were sent one by one."""
        self._parts.append(CallArguments(self._index, "{}" if self._before == "{" else "}"))

    def _begin(self, name: str) -> None:
        """Begins a call of the function `name`, and sends the arguments that came before the
        name."""
        if self._is_open or not name or not (self._is_marked or name in self._functions):
            raise UnexpectedText
        self._is_open, self._before = True, "{"
        id_ = "".join(secrets.choice(_ID) for _ in range(_ID_LENGTH))
        self._parts.append(CallBegin(self._index, id_, name))
        if self._arguments is not None:
            self._parts.append(CallArguments(self._index, self._arguments))

    def _end(self) -> None:
        """Ends a well-formed call."""
        self._parts.append(CallEnd(self._index, "right"))
        self._is_open, self._arguments, self._raw = False, None, self._text.at
        self._index += 1
        self.calls += 1

    def _send_arguments(self) -> None:
        """Sends the arguments in JSON that have come since the last time."""
        if self._sent is not None and self._text.at > self._sent:
            new = self._text.text[self._sent : self._text.at]
            self._parts.append(CallArguments(self._index, new))
            self._sent = self._text.at

    def _give_up(self) -> None:
        """Ends a call that is malformed, and sends its text as content. A call that is only cut by
        the end of the text stays a call."""
        text = self._text
        is_cut = self._is_cut and self._is_open and text.at >= len(text.text)
        if is_cut:
            self._send_arguments()
        if self._is_open:
            self._parts.append(CallEnd(self._index, "cut" if is_cut else "malformed"))
            self._index += 1
        self._is_open, self._arguments, self._sent = False, None, None
        if not is_cut:
            self._send(text.text[self._raw : text.at])
        self._is_behind = self._may_be_bare = False
