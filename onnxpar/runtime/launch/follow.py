"""A rank of a launch that does what rank 0 does, in the same order."""

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
    """Executes the orders of rank 0 until the order to end, and returns that order's exit status. A
    run that fails on all ranks ends nothing. Errors: RankError, which soon reaches all ranks."""
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
    """The sessions of this rank, by their numbers, and the folders for their recordings."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._sessions: dict[int, LaunchedRank] = {}
        self._folders: dict[int, OwnFolder] = {}

    def obey(self, order: Order) -> int | None:
        """Executes an order; returns the exit status of an order to end. Errors: RankError."""
        if order.do == END:
            (status,) = order.given
            return int(status)
        if order.do == START:
            self._start(order.session, *order.given)
        elif order.do != IDLE:
            self._call(order)
        return None

    def close(self) -> None:
        """Ends all sessions."""
        for number in list(self._sessions):
            self._close(number)

    def _call(self, order: Order) -> None:
        """Makes a call of a session, or ends the session."""
        call, session = _CALLS.get(order.do), self._sessions.get(order.session)
        if session is None or (call is None and order.do != CLOSE):
            what = f"{order.do!r} of session {order.session}"
            raise RankError(f"rank 0 gave an order that there is not: {what}")
        if call is None:
            return self._close(order.session)
        with suppress(RunError):  # rank 0 got the same error, and goes on
            call(session, *order.given)

    def _start(self, number: int, path: str, spec: Mapping[str, Any], timeout: float) -> None:
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
