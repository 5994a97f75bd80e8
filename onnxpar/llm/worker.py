"""Runs requests on ranks in a thread, and starts the ranks again when they die."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from onnxpar.errors import ModelError, OnnxparError, RankError
from onnxpar.llm.requests import Busy
from onnxpar.runtime.bundle import Bundle
from onnxpar.runtime.closing import Closing
from onnxpar.runtime.session import InferenceSession

READY, STARTING, DRAINING, FAILED, CLOSED = "ready", "starting", "draining", "failed", "closed"
_IDLE_CHECK = 1.0
"""Seconds after which it is checked again that the ranks still run, if there is nothing to do."""
_STARTS = 3
"""How often it is tried to start ranks again."""
Request = TypeVar("Request")
Work = TypeVar("Work")
Made = TypeVar("Made")


class Worker(Closing, Generic[Request, Work, Made]):
    """A session, and a thread that runs requests on it. A subclass says what requests are, what the
    next run computes, and what it makes of a new session.

    If a rank dies, requests that run fail, those that wait stay, and new ranks are started. The
    thread holds the lock, `_changed`, whenever it calls a method of the subclass but `_open` and
    `_run`.

    par      a folder that `onnxpar shard` wrote
    options  those of `InferenceSession`
    tell     called with a line when ranks die, and when new ones run or do not start
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

    @abstractmethod
    def _open(self, session: InferenceSession) -> Made:
        """Returns what is needed besides a new session."""

    @abstractmethod
    def _adopt(self, made: Made) -> None:
        """Goes on with what `_open` made for new ranks; requests that wait begin there."""

    @abstractmethod
    def _requests(self) -> Sequence[Request]:
        """Returns the requests that have not ended."""

    @abstractmethod
    def _running(self) -> Sequence[Request]:
        """Returns those that fail if the ranks die."""

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
        """Returns the requests whose work that is."""

    @abstractmethod
    def _run(self, work: Work) -> Callable[[], None]:
        """Computes; returns what hands the results on."""

    @property
    def status(self) -> str:
        """ "ready", "starting" while ranks start again, "draining", "failed" or "closed"."""
        return self._status

    def drain(self, timeout: float) -> bool:
        """Takes no more requests, and waits until all have ended; returns False if some have not
        after `timeout` seconds."""
        with self._changed:
            if self._status in (READY, STARTING):
                self._status = DRAINING
            return self._changed.wait_for(lambda: not self._requests(), timeout)

    def close(self) -> None:
        """Cancels all requests, and ends the ranks."""
        with self._changed:
            self._status = CLOSED
            for request in self._requests():
                self._cancel(request)
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._session.close()

    def _start_ranks(self) -> Made:
        """Starts the first ranks; returns what `_open` made. Errors: RankError if a rank does not
        start."""
        self._session, made = self._start()
        return made

    def _start_thread(self, name: str) -> None:
        """Starts the thread of this name, once all is there that it needs."""
        self._status = READY
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _check_open(self) -> None:
        """Errors: Busy if no requests are taken."""
        if self._status in (DRAINING, FAILED, CLOSED):
            raise Busy(f"the server is {self._status}; send the request to another one")

    def _cancel(self, request: Any) -> None:
        with self._changed:
            request.is_cancelled = True
            self._changed.notify_all()

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
        """Runs what there is to do until all is closed: the thread."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._requests() or self._status == CLOSED, _IDLE_CHECK
                )
                self._end_cancelled()
                self._changed.notify_all()
                if self._status == CLOSED:
                    return
                work = self._next()
            if work is not None:
                self._step(work)
            elif self._status != FAILED:
                self._check_ranks()

    def _check_ranks(self) -> None:
        """Starts ranks again that have died while there was nothing to do."""
        try:
            self._session.check_alive()
        except RankError as error:
            self._restart(error)

    def _step(self, work: Work) -> None:
        try:
            finish = self._run(work)
        except RankError as error:
            self._restart(error)
        except Exception as error:  # the requests of this run fail; the others go on
            self._fail_all(self._of(work), _reported(error))
        else:
            with self._changed:
                finish()
                self._changed.notify_all()

    def _fail_all(self, requests: Sequence[Request], error: OnnxparError) -> None:
        with self._changed:
            for request in requests:
                self._fail(request, error)
            self._changed.notify_all()

    def _restart(self, error: RankError) -> None:
        """Fails the requests that run, and starts new ranks, on which those that wait begin; fails
        these, too, if no ranks start."""
        with self._changed:
            if self._status == READY:
                self._status = STARTING
            running = list(self._running())
        self._fail_all(running, error)
        self._session.close()
        self._tell(f"{_first_line(error)}; new ranks start")
        started = self._started_again()
        is_up = not isinstance(started, OnnxparError)
        self._tell("the ranks run again" if is_up else f"no ranks start: {_first_line(started)}")
        with self._changed:
            if isinstance(started, OnnxparError):
                self._status = FAILED
                self._fail_all(list(self._requests()), started)
                return
            self._session, made = started
            self._adopt(made)
            if self._status == STARTING:
                self._status = READY
            self._changed.notify_all()

    def _started_again(self) -> tuple[InferenceSession, Made] | OnnxparError:
        """Starts new ranks; returns the last error if they do not start."""
        for attempt in range(1, _STARTS + 1):
            try:
                return self._start()
            except OnnxparError as error:
                failed = error
                time.sleep(attempt / 2)
        return failed


def _first_line(error: object) -> str:
    return str(error).splitlines()[0]


def _reported(error: Exception) -> OnnxparError:
    """An error as the listeners get it."""
    if isinstance(error, OnnxparError):
        return error
    return OnnxparError(f"internal error: {type(error).__name__}: {error}")
