"""Runs requests on ranks in a thread, and starts the ranks again when they die."""

from __future__ import annotations

import math
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from onnxpar.base.errors import LaunchError, ModelError, OnnxparError, RankError, RunError
from onnxpar.llm.requests import Busy
from onnxpar.runtime.ranks.closing import Closing
from onnxpar.runtime.ranks.log import describe
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import InferenceSession

READY, STARTING, FAILED, CLOSED = "ready", "starting", "failed", "closed"
_IDLE_CHECK = 1.0
"""Seconds between checks that the ranks still run, while there is nothing to do."""
_STARTS = 3
"""The number of attempts to start ranks again."""
_PAUSE, _LONGEST_PAUSE = 10.0, 300.0
"""Seconds until the next attempt while there are other workers: at first, and at most."""
MOST_LOSSES = 2
"""How often a request goes on after its ranks died: the request itself may kill them."""


class Submitted(Protocol):
    """A request: whether it must end, and how often ranks died while they computed it."""

    is_cancelled: bool
    losses: int


Request = TypeVar("Request", bound=Submitted)
Work = TypeVar("Work")
Made = TypeVar("Made")


class Worker(Closing, Generic[Request, Work, Made]):
    """A session, and a thread that runs requests on it. A subclass says what requests are, what the
    next run computes, and which objects it needs for a new session.

    par      a folder that `onnxpar shard` wrote
    options  those of `InferenceSession`
    tell     called with a line when ranks die, and when new ones run or do not start

    If a rank dies, all requests are offered to other workers of the same model, if there are any,
    and new ranks are started, which compute the rest. The thread holds the lock, `_changed`,
    whenever it calls a method of the subclass, except `_open` and `_run`.
    """

    def __init__(
        self,
        par: str | os.PathLike[str],
        options: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        self._par, self._options, self._tell = par, options, tell
        self._changed = threading.Condition()  # a listener may cancel requests
        self._status = STARTING
        self._digest = ""
        self._moving: Sequence[Request] = ()
        """Requests that are offered to other workers."""
        self._continued = 0
        self._pause, self._next_start = _PAUSE, math.inf
        self.hand_over: Callable[[Sequence[Request]], Sequence[Request]] | None = None
        """Offers requests to other workers, and returns those that none has taken; None if there
        are no others. It is called without the lock."""

    @abstractmethod
    def _open(self, session: InferenceSession) -> Made:
        """Returns the subclass's objects for a new session. Called without the lock."""

    @abstractmethod
    def _adopt(self, made: Made) -> None:
        """Called when new ranks run: uses the objects that `_open` returned for them; requests that
        wait begin there."""

    @abstractmethod
    def _requests(self) -> Sequence[Request]:
        """Returns the requests that have not ended."""

    @abstractmethod
    def _running(self) -> Sequence[Request]:
        """Returns the requests that have begun on the ranks."""

    @abstractmethod
    def _release(self) -> Sequence[Request]:
        """Called when the ranks are lost: removes all requests, as if none had begun, and returns
        them, the oldest first; tells their listeners nothing."""

    @abstractmethod
    def _take(self, requests: Sequence[Request]) -> None:
        """Called with requests that were released, here or elsewhere: queues them before the
        requests that have not begun anywhere."""

    @abstractmethod
    def _end_cancelled(self) -> None:
        """Ends the requests that are cancelled."""

    @abstractmethod
    def _fail(self, request: Request, error: OnnxparError) -> None:
        """Ends a request that cannot be finished."""

    @abstractmethod
    def _next(self) -> Work | None:
        """Returns what the next run computes; None if there is nothing to do."""

    @abstractmethod
    def _of(self, work: Work) -> Sequence[Request]:
        """Returns the requests that this work computes."""

    @abstractmethod
    def _run(self, work: Work) -> Callable[[], None]:
        """Computes the work; returns a function that hands on the results."""

    @property
    def status(self) -> str:
        """ "ready", "starting" while ranks start again, "failed" or "closed"."""
        return self._status

    def close(self) -> None:
        """Cancels all requests, and ends the ranks."""
        with self._changed:
            self._status = CLOSED
            for request in self._pending():
                self._cancel(request)
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._session.close()

    def take_over(self, request: Request) -> bool:
        """Goes on with a request that another worker has released; returns False if this one's
        ranks do not run. Any thread may call it."""
        with self._changed:
            if self._status != READY or self._moving:
                return False
            self._take([request])
            self._changed.notify_all()
        return True

    def _pending(self) -> Sequence[Request]:
        """The requests that have not ended, also while they are offered to others."""
        return [*self._requests(), *self._moving]

    def _is_closed(self) -> bool:
        return self._status == CLOSED

    def _start_ranks(self) -> Made:
        """Starts the first ranks; returns what `_open` made. Errors: RankError if a rank does not
        start."""
        self._session, made = self._start()
        return made

    def _start_thread(self, name: str) -> None:
        """Starts the thread of this name; all that it needs must exist."""
        self._status = READY
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _check_open(self) -> None:
        """Errors: Busy if no requests are taken."""
        if self._status in (FAILED, CLOSED):
            raise Busy(f"the server is {self._status}; send the request to another one")

    def _cancel(self, request: Request) -> None:
        """Ends a request before its next run, whichever worker has it then. Takes no lock: a
        listener that holds that of another worker may call it."""
        request.is_cancelled = True

    def _start(self) -> tuple[InferenceSession, Made]:
        """Starts ranks. Errors: RankError if one does not start; ModelError if the folder is not
        the one of the first ranks."""
        digest = Bundle.load(self._par).digest
        self._digest = self._digest or digest
        if digest != self._digest:
            raise ModelError(
                f"{os.fspath(self._par)} was written again since the server started; start the "
                "server again to serve what is there now"
            )
        session = InferenceSession(self._par, **self._options)
        try:
            return session, self._open(session)
        except BaseException:
            session.close()
            raise

    def _serve(self) -> None:
        """The thread: runs work until the worker is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._requests() or self._status == CLOSED, _IDLE_CHECK
                )
                self._end_cancelled()
                if self._status == CLOSED:
                    return
                work = self._next()
            if work is not None:
                self._step(work)
            elif self._status != FAILED:
                self._check_ranks()
            elif time.monotonic() > self._next_start:
                self._start_after_failure()

    def _check_ranks(self) -> None:
        """Starts ranks again that have died while there was nothing to do."""
        try:
            self._session.check_alive()
        except RankError as error:
            self._restart(error)

    def _step(self, work: Work) -> None:
        try:
            finish = self._run(work)
        except RunError as error:  # the ranks can continue, but would fail again
            self._fail_all(self._of(work), error)
        except RankError as error:
            self._restart(error)
        except Exception as error:  # the requests of this run fail; the others go on
            self._fail_all(self._of(work), _reported(error))
        else:
            with self._changed:
                finish()

    def _fail_all(self, requests: Sequence[Request], error: OnnxparError) -> None:
        with self._changed:
            for request in requests:
                self._fail(request, error)

    def _restart(self, error: RankError) -> None:
        """Moves the requests to other workers, and starts new ranks for the requests that nobody
        took; fails these requests if no ranks start, as after a LaunchError."""
        with self._changed:
            if self._status == READY:
                self._status = STARTING
            running = list(self._running())
            for request in running:
                request.losses += 1
        lost = [request for request in running if request.losses > MOST_LOSSES]
        self._fail_all(lost, error)
        self._continued += len(running) - len(lost)
        self._session.close()
        if isinstance(error, LaunchError):
            self._adopt_started(error)
            return
        self._tell(f"{_first_line(error)}; new ranks start")
        self._move()
        self._adopt_started(self._started_again())

    def _move(self) -> None:
        """Called when the ranks have failed: offers all requests, running and waiting, to other
        workers, and queues those again that no worker takes."""
        if self.hand_over is None:
            with self._changed:
                self._take(self._release())
            return
        with self._changed:
            self._moving = self._release()
        left = self.hand_over(self._moving)
        with self._changed:
            self._take(left)
            self._moving = ()

    def _adopt_started(self, started: tuple[InferenceSession, Made] | OnnxparError) -> None:
        """Called after an attempt to start ranks: goes on with new ranks; after an error, fails the
        requests that no other worker takes."""
        is_up = not isinstance(started, OnnxparError)
        self._tell("the ranks run again" if is_up else f"no ranks start: {_first_line(started)}")
        if isinstance(started, OnnxparError) and self.hand_over is not None:
            self._move()
        with self._changed:
            if isinstance(started, OnnxparError):
                if self._status != CLOSED:
                    self._status = FAILED
                self._next_start = self._time_of_next_start()
                self._fail_all(list(self._requests()), started)
                return
            self._session, made = started
            self._adopt(made)
            if self._status in (STARTING, FAILED):
                self._status, self._pause = READY, _PAUSE

    def _time_of_next_start(self) -> float:
        """Returns when to try again to start ranks; never (inf), if there are no other workers to
        which requests can go meanwhile."""
        if self.hand_over is None:
            return math.inf
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return time.monotonic() + pause

    def _start_after_failure(self) -> None:
        """Tries again to start ranks."""
        try:
            started: tuple[InferenceSession, Made] | OnnxparError = self._start()
        except Exception as error:  # of the disk, too: the thread goes on
            started = _reported(error)
        self._adopt_started(started)

    def _started_again(self) -> tuple[InferenceSession, Made] | OnnxparError:
        """Starts new ranks, unless the worker is closed; returns the last error if they do not
        start."""
        failed = OnnxparError("the server is closed")
        for attempt in range(1, _STARTS + 1):
            if self._is_closed():
                break
            try:
                return self._start()
            except Exception as error:  # of the disk, too: the thread goes on
                failed = _reported(error)
            with self._changed:
                self._changed.wait_for(self._is_closed, attempt / 2)
        return failed


def _first_line(error: object) -> str:
    return str(error).splitlines()[0]


def _reported(error: Exception) -> OnnxparError:
    """Returns an error in the form that listeners get."""
    if isinstance(error, OnnxparError):
        return error
    return OnnxparError(f"internal error: {describe(error)}")
