"""Runs requests on ranks in a thread, and starts the ranks again when they die: the base of engines
and embedders."""

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
    """A request, as workers see it.

    is_cancelled  True if it must end before its next run
    losses        how often ranks died while they computed it
    """

    is_cancelled: bool
    losses: int


Request = TypeVar("Request", bound=Submitted)
Work = TypeVar("Work")
Made = TypeVar("Made")


class Worker(Closing, Generic[Request, Work, Made]):
    """A session, and a thread that runs requests on it. A subclass says what a request is, and what
    the next run computes.

    par      a folder that `onnxpar shard` wrote
    options  those of `InferenceSession`
    tell     called with a line when ranks die, and when new ones run or do not start

    Its type parameters are a request, the work of one run, and the objects that the subclass makes
    for each new session. If a rank dies, all requests are offered to other workers of the
    same model, if there are any, and new ranks are started, which compute the rest. The thread
    holds the lock, `_changed`, whenever it calls a method of the subclass, except `_open` and
    `_run`.
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
        """Returns the objects that the subclass needs for a new session. Called without the
        lock."""

    @abstractmethod
    def _adopt(self, made: Made) -> None:
        """Called when new ranks run: from now on, uses `made`, the objects that `_open` returned
        for their session. Requests that wait begin there."""

    @abstractmethod
    def _requests(self) -> Sequence[Request]:
        """Returns the requests that have not ended."""

    @abstractmethod
    def _running(self) -> Sequence[Request]:
        """Returns the requests that the ranks have begun to compute."""

    @abstractmethod
    def _release(self) -> Sequence[Request]:
        """Called when the ranks are lost: removes all requests and returns them, the oldest first,
        ready to begin anew elsewhere. Their listeners are not called."""

    @abstractmethod
    def _take(self, requests: Sequence[Request]) -> None:
        """Called with requests that this or another worker has released: queues them before
        requests that no worker has begun."""

    @abstractmethod
    def _end_cancelled(self) -> None:
        """Ends the requests that are cancelled."""

    @abstractmethod
    def _fail(self, request: Request, error: OnnxparError) -> None:
        """Removes a request that cannot be finished, and tells its listener the error."""

    @abstractmethod
    def _next(self) -> Work | None:
        """Returns what the next run computes; None if there is nothing to do."""

    @abstractmethod
    def _of(self, work: Work) -> Sequence[Request]:
        """Returns the requests that `work` computes."""

    @abstractmethod
    def _run(self, work: Work) -> Callable[[], None]:
        """Computes the work; returns a function that gives the requests their results. `_run` is
        called without the lock, the function with it."""

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
        """Continues a request that another worker has released. Returns False if the ranks of this
        worker do not run. Any thread may call it."""
        with self._changed:
            if self._status != READY or self._moving:
                return False
            self._take([request])
            self._changed.notify_all()
        return True

    def _pending(self) -> Sequence[Request]:
        """Returns the requests that have not ended, including requests that are just being offered
        to other workers."""
        return [*self._requests(), *self._moving]

    def _is_closed(self) -> bool:
        return self._status == CLOSED

    def _start_ranks(self) -> Made:
        """Starts the first ranks; returns the objects that `_open` made for them. Errors: RankError
        if a rank does not start."""
        self._session, made = self._start()
        return made

    def _start_thread(self, name: str) -> None:
        """Starts the thread, called `name`; the subclass is complete by then."""
        self._status = READY
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _check_open(self) -> None:
        """Errors: Busy if the worker is closed, or its ranks do not start."""
        if self._status in (FAILED, CLOSED):
            raise Busy(f"the server is {self._status}; send the request to another one")

    def _cancel(self, request: Request) -> None:
        """Lets a request end before its next run, whichever worker has it then. Takes no lock, so a
        listener may call it while another worker's lock is held."""
        request.is_cancelled = True

    def _start(self) -> tuple[InferenceSession, Made]:
        """Starts ranks; returns their session, and the objects that `_open` made for it. Errors:
        RankError if a rank does not start; ModelError if the folder was written again since the
        first start."""
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
        """The loop of the thread: runs work until the worker is closed, and starts ranks again."""
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
        """Starts ranks again if they have died while there was nothing to do."""
        try:
            self._session.check_alive()
        except RankError as error:
            self._restart(error)

    def _step(self, work: Work) -> None:
        """Runs work on the ranks, and gives the requests their results or the error. If ranks have
        died, starts new ones."""
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
        """Called when ranks have died with `error`: offers the requests to other workers, and
        starts new ranks for the others. If no ranks start, or after a LaunchError, these requests
        fail."""
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
        """Called when the ranks have died: offers all requests to other workers, and queues those
        again that no worker takes."""
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
        """Called after an attempt to start ranks, with their session and objects, or the error:
        goes on with the new ranks, or fails the requests that no other worker takes."""
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
        """Returns the time, by `time.monotonic`, at which to try again to start ranks. Infinite if
        there are no other workers that could serve meanwhile."""
        if self.hand_over is None:
            return math.inf
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return time.monotonic() + pause

    def _start_after_failure(self) -> None:
        """Tries once more to start ranks, after earlier attempts have failed."""
        try:
            started: tuple[InferenceSession, Made] | OnnxparError = self._start()
        except Exception as error:  # of the disk, too: the thread goes on
            started = _reported(error)
        self._adopt_started(started)

    def _started_again(self) -> tuple[InferenceSession, Made] | OnnxparError:
        """Starts new ranks, in up to `_STARTS` attempts; returns their session and objects, or the
        last error if they do not start or the worker is closed."""
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
    """Returns an error as an OnnxparError, which listeners get."""
    if isinstance(error, OnnxparError):
        return error
    return OnnxparError(f"internal error: {describe(error)}")
