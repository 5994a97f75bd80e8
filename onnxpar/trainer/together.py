"""Makes the processes of a run agree: all get the result, or the error, of a function that rank 0
calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from onnxpar.base import errors
from onnxpar.base.errors import OnnxparError

_KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OnnxparError) and "__init__" not in vars(kind)
}
"""The error classes, by name, that can be created from a message alone: rank 0 sends name and
message."""


class Together:
    """All processes of a run: a single process or, under a launcher, one per rank. All processes
    must make the same calls of its methods, in the same order.

    exchange  a function that sends bytes to all processes and returns the bytes of all, by rank
    """

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
        """True if this process is rank 0."""
        return self.rank == 0

    def each(self, own: Any) -> list[Any]:
        """Returns the values that all processes pass as `own`, by rank. Values are sent as JSON.
        Errors: RankError."""
        return [json.loads(text) for text in self._exchange(json.dumps(own).encode())]

    def first(self, make: Callable[[], Any]) -> Any:
        """Calls `make` on rank 0 only, and returns its result, sent as JSON, in all processes. If
        `make` raises an OnnxparError, all processes raise it."""
        if not self.leads:
            result = self.each(None)[0]
            if "error" in result:
                raise _KINDS.get(result["kind"], OnnxparError)(result["error"])
            return result["made"]
        try:
            result = {"made": make()}
        except OnnxparError as error:
            self.each({"error": str(error), "kind": type(error).__name__})
            raise
        return self.each(result)[0]["made"]


ALONE = Together()
"""The only process of a run."""
