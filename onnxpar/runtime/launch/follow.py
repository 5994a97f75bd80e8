"""A rank of a launch that repeats what rank 0 does, in the same order, so that collectives
match."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxpar.base.errors import OnnxparError, RankError, RunError
from onnxpar.base.own_folder import OwnFolder
from onnxpar.runtime.launch.launched_rank import LaunchedRank
from onnxpar.runtime.ranks.log import describe
from onnxpar.runtime.ranks.orders import CLOSE, END, IDLE, START, Order, Orders
from onnxpar.runtime.ranks.planned_run import Request
from onnxpar.runtime.session.options import SessionSpec


def follow(orders: Orders) -> int:
    """Executes the orders of rank 0 until the order to end; returns the exit status that this order
    brings. A run that fails on all ranks ends nothing. Errors: RankError, which soon reaches all
    ranks."""
    follower = _Follower(orders)
    try:
        while (status := follower.obey(orders.hear())) is None:
            pass
        return status
    except Exception as error:  # the outermost boundary of a rank: the others wait for it
        orders.abort(f"{orders.launched.name} failed: {describe(error)}")
        raise
    finally:
        follower.close()
        orders.close()


class _Follower:
    """Executes orders of rank 0 on a rank that has this rank's shards of rank 0's sessions.
    Sessions have numbers; a session that records a profile has a folder of this rank's own for
    it."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._sessions: dict[int, LaunchedRank] = {}
        self._folders: dict[int, OwnFolder] = {}

    def obey(self, order: Order) -> int | None:
        """Executes one order. Returns the exit status if it is the order to end, else None. Errors:
        RankError if a call failed for good."""
        if order.do == END:
            (status,) = order.given
            return int(status)
        if order.do == START:
            self._start(order.session, *order.given)
        elif order.do != IDLE:
            self._call(order)
        return None

    def close(self) -> None:
        """Ends this rank's part of all sessions."""
        for number in list(self._sessions):
            self._close(number)

    def _call(self, order: Order) -> None:
        """Calls the method of a session that the order names, or ends the session. Errors:
        RankError for an order that does not exist."""
        call, session = _CALLS.get(order.do), self._sessions.get(order.session)
        if session is None or (call is None and order.do != CLOSE):
            what = f"{order.do!r} of session {order.session}"
            raise RankError(f"rank 0 gave an order that there is not: {what}")
        if call is None:
            return self._close(order.session)
        with suppress(RunError):  # rank 0 got the same error, and goes on
            call(session, *order.given)

    def _start(self, number: int, path: str, spec: Mapping[str, Any], timeout: float) -> None:
        """Opens session `number` on the sharded model at `path`."""
        own = SessionSpec.from_json(spec)
        if own.profile:  # a folder of rank 0
            self._folders[number] = OwnFolder()
            own = SessionSpec.from_json({**spec, "profile": str(self._folders[number].path)})
        self._sessions[number] = LaunchedRank(Path(path), own, self._orders.launched, timeout)

    def _close(self, number: int) -> None:
        self._sessions.pop(number).close()
        if number in self._folders:
            self._folders.pop(number).close()


def _run(session: LaunchedRank, request: Mapping[str, Any], feeds: Mapping[str, Any]) -> None:
    session.run(Request(**request), feeds)


def _write_log(session: LaunchedRank, text: str) -> None:
    try:
        session.write_log(text)
    except OnnxparError as error:  # of a file that rank 0 does not write
        warnings.warn(str(error), stacklevel=2)


_CALLS: Mapping[str, Callable[..., Any]] = {
    "run": _run,
    "read_state": LaunchedRank.read_state,
    "write_state": LaunchedRank.write_state,
    "clear_state": LaunchedRank.clear_state,
    "save_states": LaunchedRank.save_states,
    "save_states_later": LaunchedRank.save_states_later,
    "load_states": LaunchedRank.load_states,
    "write_log": _write_log,
    "reset_states": LaunchedRank.reset_states,
    "undo_states": LaunchedRank.undo_states,
    "end_profile": LaunchedRank.end_profile,
}
"""The calls of a session that rank 0 may order."""
