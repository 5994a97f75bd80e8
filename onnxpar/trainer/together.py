"""The processes of a training act as one: what the first decides or fails at, all do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from onnxpar import errors
from onnxpar.errors import OnnxparError

_KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OnnxparError) and "__init__" not in vars(kind)
}
"""Errors that a text alone makes, by name: what another process names is one of these, or none."""


class Together:
    """All processes of a training: one, or under a launcher one for each rank. All make the same
    calls. `exchange` gives each process the bytes of all, by rank."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        exchange: Callable[[bytes], list[bytes]] = lambda payload: [payload],
    ) -> None:
        self.rank = rank
        self.size = size
        self._exchange = exchange

    @property
    def leads(self) -> bool:
        """Whether this process is the first."""
        return self.rank == 0

    def each(self, own: Any) -> list[Any]:
        """What every process gives, by rank; it travels as JSON. Errors: RankError."""
        return [json.loads(text) for text in self._exchange(json.dumps(own).encode())]

    def first(self, make: Callable[[], Any]) -> Any:
        """What the first process makes; the others only wait for it. It travels as JSON. Where it
        fails with an error of `onnxpar.errors`, all processes raise that."""
        if not self.leads:
            told = self.each(None)[0]
            if "error" in told:
                raise _KINDS.get(told["kind"], OnnxparError)(told["error"])
            return told["made"]
        try:
            told = {"made": make()}
        except OnnxparError as error:
            self.each({"error": str(error), "kind": type(error).__name__})
            raise
        return self.each(told)[0]["made"]


ALONE = Together()
"""A process by itself."""
