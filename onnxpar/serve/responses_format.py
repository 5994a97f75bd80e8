"""The format of answers of /v1/responses: whole, or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onnxpar.serve.answer_parts import CallArguments, CallBegin, Part, Text
from onnxpar.serve.answers import Piece, Usage
from onnxpar.serve.formats import Format
from onnxpar.serve.responses_request import ResponsesRequest

Events = list[dict[str, Any]]
_RUNNING, _DONE, _CUT = "in_progress", "completed", "incomplete"


@dataclass
class _Item:
    """An item of the output: a message, or a call of a tool.

    index         its number in the output
    id            its id
    call          the beginning of the call; None for a message
    text          the text of the message, or the arguments of the call, so far
    status        in_progress, completed or incomplete
    is_malformed  True if the call turned out not to be a call
    """

    index: int
    id: str
    call: CallBegin | None
    text: str = ""
    status: str = _RUNNING
    is_malformed: bool = False

    def json(self) -> dict[str, Any]:
        """Returns the item as JSON, as it is now."""
        head = {"id": self.id, "status": self.status}
        if self.call is not None:
            names = {"call_id": self.call.id, "name": self.call.name}
            return {**head, "type": "function_call", **names, "arguments": self.text}
        content = [] if self.status == _RUNNING else [self.part()]
        return {**head, "type": "message", "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        """Returns the only part of a message, as JSON."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def event(self, kind: str, **members: Any) -> dict[str, Any]:
        """Returns an event of this kind about the item, with further members."""
        place = {"item_id": self.id, "output_index": self.index}
        return {"type": f"response.{kind}", **place, **members}


class ResponsesFormat(Format):
    """The format of /v1/responses, which has a single answer."""

    def __init__(
        self, model: str, request: ResponsesRequest, bytes_of: Callable[[int], bytes], number: int
    ) -> None:
        origin = {"id": _id("resp"), "object": "response", "created_at": int(time.time())}
        self._head = {**origin, "model": model, **request.repeated}
        self._head |= {"previous_response_id": None, "store": False, "truncation": "disabled"}
        self._items: list[_Item] = []
        self._open: _Item | None = None
        """The last item, if it may continue."""
        self._status = _RUNNING

    def begin(self) -> Events:
        return [self._event("created"), self._event("in_progress")]

    def chunks(self, piece: Piece) -> Events:
        events: Events = []
        for part in piece.parts:
            events += self._events(part)
        if piece.finish is not None:
            self._status = _CUT if piece.finish == "length" else _DONE
            events += self._close(self._status)
        return events

    def end(self, usage: Usage) -> Events:
        return [self._event(self._status, usage)]

    def add(self, piece: Piece) -> None:
        self.chunks(piece)

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Returns the response as JSON, without malformed calls, which a stream may have begun."""
        return self._response([item for item in self._items if not item.is_malformed], usage)

    def _event(self, kind: str, usage: Usage | None = None) -> dict[str, Any]:
        """Returns an event about the whole response, as it is now."""
        return {"type": f"response.{kind}", "response": self._response(self._items, usage)}

    def _response(self, items: Sequence[_Item], usage: Usage | None) -> dict[str, Any]:
        """Returns the whole response as JSON, with these items as its output; `usage` is None until
        it is complete."""
        return {
            **self._head,
            "status": self._status,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if self._status == _CUT else None
            ),
            "output": [item.json() for item in items],
            "usage": None if usage is None else _usage(usage),
        }

    def _events(self, part: Part) -> Events:
        """Returns the events for a part of the answer."""
        if isinstance(part, Text):
            events: Events = []
            if self._open is None:
                events = self._begin(None)
            return events + self._delta(
                "output_text.delta", part.text, content_index=0, logprobs=[]
            )
        if isinstance(part, CallBegin):
            return self._close(_DONE) + self._begin(part)
        if isinstance(part, CallArguments):
            return self._delta("function_call_arguments.delta", part.text)
        assert self._open is not None, "a call is begun before it ends"
        self._open.is_malformed = part.outcome == "malformed"
        return self._close(_DONE if part.outcome == "right" else _CUT)

    def _begin(self, call: CallBegin | None) -> Events:
        """Begins an item, a call or (None) a message; returns the events that say so."""
        item = _Item(len(self._items), _id("msg" if call is None else "fc"), call)
        self._items.append(item)
        self._open = item
        added = {"output_index": item.index, "item": item.json()}
        events: Events = [{"type": "response.output_item.added", **added}]
        if call is None:
            events.append(item.event("content_part.added", content_index=0, part=item.part()))
        return events

    def _delta(self, kind: str, text: str, **members: Any) -> Events:
        """Appends text to the item that is open; returns the event of this kind that says so."""
        assert self._open is not None, "an item is begun before it goes on"
        self._open.text += text
        return [self._open.event(kind, delta=text, **members)]

    def _close(self, status: str) -> Events:
        """Ends the item that is open, if there is one, with this status; returns the events that
        say so."""
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = status
        if item.call is not None:
            names = {"name": item.call.name, "arguments": item.text}
            events = [item.event("function_call_arguments.done", **names)]
        else:
            at = {"content_index": 0}
            events = [
                item.event("output_text.done", text=item.text, logprobs=[], **at),
                item.event("content_part.done", part=item.part(), **at),
            ]
        done = {"output_index": item.index, "item": item.json()}
        return [*events, {"type": "response.output_item.done", **done}]


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.new,
    }
