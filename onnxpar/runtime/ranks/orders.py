"""Orders that rank 0 of a launch sends to all other ranks, through a world only for this
purpose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxpar.base.errors import RankError
from onnxpar.base.typed_bytes import of_bytes, to_bytes
from onnxpar.runtime.launch.launch import Launched
from onnxpar.runtime.ranks.check_start import exchange
from onnxpar.runtime.ranks.closing import Closing
from onnxpar.runtime.ranks.collectives import gather_bytes
from onnxpar.runtime.ranks.fetch import complete
from onnxpar.runtime.ranks.groups import World
from onnxpar.runtime.ranks.log import describe
from onnxpar.runtime.states.host_memory import HostMemory, memory_of_hosts, told_memory

START, CLOSE, IDLE, END = "start", "close", "idle", "end"
"""Orders besides the calls of a session: start or close a session; do nothing; end the rank."""
_worlds = itertools.count()


@dataclass(frozen=True)
class Order:
    """An order of rank 0 to the other ranks.

    do       START, CLOSE, IDLE, END, or the name of a session's method
    session  the number of the session
    given    the arguments
    """

    do: str
    session: int = 0
    given: Sequence[Any] = ()

    def pack(self) -> bytes:
        """Returns the order as bytes."""
        return to_bytes((self.do, self.session, tuple(self.given)))

    @staticmethod
    def unpack(data: bytes) -> Order:
        """Returns the order in these bytes. Errors: RankError for bytes that are no order."""
        try:
            do, session, given = of_bytes(data)
        except (ValueError, TypeError) as error:
            raise RankError(f"rank 0 sent bytes that are no order: {error}") from None
        if type(do) is not str or type(session) is not int or type(given) is not tuple:
            raise RankError("rank 0 sent bytes that are no order")
        return Order(do, session, given)


class Orders(Closing):
    """The connection over which rank 0 sends orders, and the other ranks receive them. All ranks
    create theirs together.

    hosts  the memory of the hosts of all ranks

    Errors: RankError if a rank does not come within `timeout` seconds, here and in each call; then
    every later call fails with the same reason.
    """

    def __init__(self, launched: Launched, timeout: float) -> None:
        self.launched, self.timeout = launched, timeout
        self._world = World.create(
            f"orders-{next(_worlds)}",
            launched.rank,
            launched.size,
            launched.store,
            launched.bind_address,
            timeout,
        )
        told = exchange(self._world, told_memory(), "hosts")
        self.hosts: Sequence[HostMemory] = memory_of_hosts(told)

    def fetch(self, path: Path) -> None:
        """Fetches the files of the sharded model at `path` to ranks that lack them; all ranks call
        this. Errors: as `complete`."""
        try:
            complete(path, self._world)
        except Exception as error:  # the others wait for this rank
            self.abort(f"{self.launched.name} failed: {describe(error)}")
            raise

    def tell(self, order: bytes) -> None:
        """Sends rank 0's order to all other ranks; returns when they have received it. `order` is a
        result of `Order.pack`."""
        gather_bytes(self._world, order, "orders")

    def hear(self) -> Order:
        """Returns rank 0's next order; called on the other ranks."""
        return Order.unpack(gather_bytes(self._world, b"", "orders")[0])

    def abort(self, reason: str) -> None:
        """Makes all calls of these connections fail on all ranks, now and later, with this
        reason."""
        self._world.abort(reason)

    def close(self) -> None:
        """Leaves the world through which orders are sent."""
        self._world.close()
