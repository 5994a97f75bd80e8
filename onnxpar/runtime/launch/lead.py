"""Sessions of a program that runs in rank 0 of a launch alone: the other ranks repeat each of its
calls (`follow.py`)."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests
from onnxpar.base.errors import LaunchError, OnnxparError, RankError, RunError
from onnxpar.base.interrupts import STATUSES, Terminated
from onnxpar.runtime.launch.launched_rank import LaunchedRank
from onnxpar.runtime.profile.profile import Record
from onnxpar.runtime.ranks.log import describe
from onnxpar.runtime.ranks.orders import CLOSE, END, IDLE, START, Order, Orders
from onnxpar.runtime.ranks.planned_run import KeptShapes, Request
from onnxpar.runtime.ranks.ranks import PartsOf
from onnxpar.runtime.session.bundle import Bundle, Sizes
from onnxpar.runtime.session.options import SessionSpec
from onnxpar.runtime.session.shards import Rows
from onnxpar.runtime.states.host_memory import HostMemory
from onnxpar.runtime.states.state_files import Origin

T = TypeVar("T")
"""The result of a call."""
_BEATS = 4
"""At least so many idle orders are sent within the timeout, after which ranks give rank 0 up."""
_LONGEST_PAUSE = 1.0
"""Seconds within which rank 0, while it makes no calls, notices that a rank has died."""
_LEAVING = 1.0
"""Seconds that `Lead.end` waits for a call that has not returned."""


class Lead:
    """Rank 0 of a launch. Sessions take it as their `start_ranks`: each call of theirs is also made
    on all other ranks, which run `follow`. The end of the `with` block ends these ranks, with the
    exit status of this process.

    Threads may share a lead and its sessions. If a rank dies or does not answer within the timeout,
    the call, and each later one, raises a LaunchError that names the rank: processes that a
    launcher has started are not started again. `check` raises that error between calls.
    """

    def __init__(self, orders: Orders) -> None:
        assert orders.launched.rank == 0, "rank 0 leads"
        self._orders = orders
        self._lock = threading.RLock()  # the garbage collector may close sessions anywhere
        self._inside: int | None = None  # the thread that is in a call
        self._sessions = itertools.count(1)
        self._left: deque[tuple[int, LaunchedRank]] = deque()
        self._failure: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="onnxpar-lead", daemon=True)
        self._thread.start()

    @property
    def hosts(self) -> Sequence[HostMemory]:
        """The memory of each host on which ranks of the launch run."""
        return self._orders.hosts

    def __call__(self, bundle: Bundle, spec: SessionSpec, timeout: float) -> LedRanks:
        """Starts a session on all ranks; returns its ranks. Errors: RankError if the session does
        not start on all ranks."""
        number = next(self._sessions)
        arguments = os.fspath(bundle.path), asdict(spec), timeout

        def start() -> LaunchedRank:
            return LaunchedRank(bundle.path, spec, self._orders.launched, timeout)

        return LedRanks(self, number, self.all_do(Order(START, number, arguments), start))

    def check(self) -> None:
        """Raises a LaunchError if ranks have failed for good."""
        if self._failure is not None:
            raise LaunchError(self._failure)

    def all_do(self, order: Order, own: Callable[[], T]) -> T:
        """Sends an order to the other ranks, and executes it on this rank by calling `own`; returns
        the result of `own`. Errors: RunError if the ranks can continue, else LaunchError."""
        data = order.pack()
        with self._lock:
            self.check()
            self._inside = threading.get_ident()
            try:
                self._close_left()
                self._orders.tell(data)
                return own()
            except RunError:
                raise
            except RankError as error:
                self._fail(str(error))
                raise LaunchError(str(error)) from error
            except OnnxparError:  # of this rank's own files
                raise
            except BaseException as error:
                text = describe(error) if isinstance(error, Exception) else "it was interrupted"
                self._fail(f"rank 0 has left a call: {text}")
                raise
            finally:
                self._inside = None

    def close_session(self, number: int, own: LaunchedRank) -> None:
        """Ends session `number` on all ranks; `own` is its part on this rank. If the garbage
        collector calls this within another call, the session ends before the next order."""
        self._left.append((number, own))
        if self._inside != threading.get_ident():
            with suppress(RankError):  # the next call says so
                self.all_do(Order(IDLE), lambda: None)
        if self._failure is not None:
            own.close()

    def end(self, status: int) -> None:
        """Ends the other ranks with this exit status. Errors: LaunchError if a rank has failed
        before that."""
        self._over.set()
        is_free = self._lock.acquire(timeout=_LEAVING if status else self._orders.timeout)
        try:
            if not is_free:
                self._fail("rank 0 has ended in a call")
            elif self._failure is None:
                self._inside = threading.get_ident()
                self._close_left()
                self._orders.tell(Order(END, given=(status,)).pack())
        except RankError as error:
            self._fail(str(error))
            raise LaunchError(str(error)) from error
        finally:
            if is_free:
                self._lock.release()
            self._orders.close()

    def __enter__(self) -> Lead:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end(0)
        else:
            with suppress(RankError):  # the first error says more
                self.end(_status(error))

    def _close_left(self) -> None:
        """Ends the sessions that were closed while another call ran."""
        while self._left:
            number, own = self._left.popleft()
            self._orders.tell(Order(CLOSE, number).pack())
            own.close()

    def _beat(self) -> None:
        """The function of the thread: sends idle orders, which tell the other ranks that rank 0 is
        alive."""
        pause = min(self._orders.timeout / _BEATS, _LONGEST_PAUSE)
        while not self._over.wait(pause) and self._failure is None:
            with suppress(RankError):  # the next call says so
                self.all_do(Order(IDLE), lambda: None)

    def _fail(self, reason: str) -> None:
        """Makes every later call fail on all ranks, for this reason."""
        if self._failure is None:
            self._failure = reason
            self._orders.abort(reason)


class LedRanks:
    """All ranks of one session of a `Lead`, seen from rank 0: each call is made on all ranks."""

    def __init__(self, lead: Lead, number: int, own: LaunchedRank) -> None:
        self._lead, self._number, self._own = lead, number, own
        self._is_open = True
        self.bundle = own.bundle
        self.facts = own.facts
        self.kept_shapes: KeptShapes = {}

    def memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns an array whose contents are arbitrary, for a feed or an output."""
        return self._own.memory(dtype, shape)

    def run(self, request: Request, feeds: Mapping[str, Array]) -> PartsOf:
        """Runs all ranks on their shards of `feeds`, which are global arrays; returns their output
        shards, by name and rank."""
        arguments = dict(vars(request)), dict(feeds)
        parts = self._do("run", arguments, lambda: self._own.run(request, feeds))
        self.kept_shapes = self._own.kept_shapes
        return parts

    def read_state(self, name: str, sizes: Sizes, rows: Rows = None) -> PartsOf:
        """Returns all ranks' shards of a state, by name and rank; with `rows` (start, end), only
        these rows of each shard."""
        return self._do(
            "read_state", (name, sizes, rows), lambda: self._own.read_state(name, sizes, rows)
        )

    def write_state(self, name: str, array: Array, sizes: Sizes) -> None:
        """Makes each rank's shard of a global array its value of a state."""
        self._do(
            "write_state", (name, array, sizes), lambda: self._own.write_state(name, array, sizes)
        )

    def clear_state(self, name: str, sizes: Sizes) -> None:
        """Fills each rank's shard of a state with zeros."""
        self._do("clear_state", (name, sizes), lambda: self._own.clear_state(name, sizes))

    def save_states(self, folder: str, sizes: Sizes) -> dict[str, Digests]:
        """Makes each rank write its shards of all states to a folder that all ranks share; returns
        the digests of the files, by file name."""
        return self._do(
            "save_states", (folder, sizes), lambda: self._own.save_states(folder, sizes)
        )

    def save_states_later(self, folder: str, sizes: Sizes) -> None:
        """Makes each rank copy its shards of all states, and write the copies in the background.
        Returns after the copies."""
        self._do(
            "save_states_later",
            (folder, sizes),
            lambda: self._own.save_states_later(folder, sizes),
        )

    def load_states(
        self, folder: str, names: Sequence[str], sizes: Sizes, origin: Origin | None = None
    ) -> None:
        """Makes each rank read its shards of these states from a folder. `origin` says how the
        states in the folder are split, if not as in this session."""
        self._do(
            "load_states",
            (folder, list(names), sizes, origin),
            lambda: self._own.load_states(folder, names, sizes, origin),
        )

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns [payload]: the other ranks have no program whose payloads could be exchanged."""
        return [payload]

    def write_log(self, text: str) -> None:
        """Adds text to the log file of each rank whose output goes to one."""
        self._do("write_log", (text,), lambda: self._own.write_log(text))

    def reset_states(self) -> None:
        """Forgets all states, so that the next run starts from initial values."""
        self._do("reset_states", (), self._own.reset_states)

    def undo_states(self) -> None:
        """Returns all states to their values before the last run."""
        self._do("undo_states", (), self._own.undo_states)

    def end_profile(self) -> Sequence[Record]:
        """Ends the recording; returns the record of each rank."""
        return self._do("end_profile", (), self._own.end_profile)

    def check_usable(self) -> None:
        """Raises a RankError if the session is closed, or if ranks have failed."""
        self._lead.check()
        self._own.check_usable()

    def check_alive(self) -> None:
        """Raises a RankError if the session is closed, or if a rank has died or does not answer,
        which idle orders notice."""
        self.check_usable()

    def close(self) -> None:
        """Ends the session on all ranks."""
        if self._is_open:
            self._is_open = False
            self._lead.close_session(self._number, self._own)

    def _do(self, do: str, given: Sequence[Any], own: Callable[[], T]) -> T:
        """Makes the call `do` with these arguments on the other ranks, and the call `own` on this
        one; returns the result of `own`."""
        self.check_usable()
        return self._lead.all_do(Order(do, self._number, given), own)


def _status(error: BaseException) -> int:
    """Returns the exit status of a command that ends with this error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, Terminated):
        return next(status for number, (_, status) in STATUSES.items() if number == error.number)
    return 2
