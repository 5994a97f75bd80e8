"""Cycles: a rank's thread runs collectives together as soon as all ranks have started them.

In each cycle, the ranks tell each other which collectives they have started. The collectives that
all ranks have started run, in their order; allreduces among them are fused in buffers. A rank that
has called `join` contributes zeros to the allreduces of the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from onnxpar.base.errors import InputError, RankError
from onnxpar.base.typed_bytes import of_bytes, to_bytes
from onnxpar.hvd.autotune import Autotune
from onnxpar.hvd.process_sets import Members
from onnxpar.hvd.reduce_work import Reduce, reduced_together
from onnxpar.runtime.ranks import collectives

Knobs = tuple[float, float]
"""The fusion threshold in bytes, and the cycle time in milliseconds."""


@dataclass
class Request:
    """A collective that this rank has started, and whose result it waits for.

    about    the collective in words (its kind, name, dtype and shape), equal on all ranks
    work     runs the collective
    future   gets the result of `work`
    """

    about: str
    work: Callable[[], Any]
    started: Callable[[], AbstractContextManager[None]] = nullcontext
    """Records on the timeline that the work has started."""
    future: Future[Any] = field(default_factory=Future)


class Cycles:
    """The thread of a rank that runs collectives in cycles.

    threshold     the fusion threshold in bytes, at first
    milliseconds  the time from one cycle to the next, at first
    tune          changes both values, on rank 0; None if they stay
    """

    def __init__(
        self, members: Members, threshold: int, milliseconds: float, tune: Autotune | None
    ) -> None:
        self._members = members
        self._knobs: Knobs = (threshold, milliseconds)
        self._tune = tune
        self._pending: list[Request] = []
        self._joining: Future[int] | None = None
        self._joined: dict[int, None] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self.count = 0
        """Cycles that have run."""
        self.buffers = 0
        """Buffers in which allreduces were sent."""
        self._thread = threading.Thread(target=self._run, name="onnxpar-hvd-cycles", daemon=True)
        self._thread.start()

    @property
    def knobs(self) -> Knobs:
        """The fusion threshold in bytes and the cycle time in milliseconds, as of now."""
        return self._knobs

    def submit(self, works: Sequence[Callable[[], Any]], kind: str, name: str) -> list[Future[Any]]:
        """Starts collectives of this kind, and returns a future for the result of each. `kind` and
        `name` are what ranks compare, and what the timeline shows. Errors: RankError after `join`
        or `stop`."""
        requests = [self._request(work, kind, name) for work in works]
        with self._changed:
            if self._stopped or self._joining:
                why = "has called join" if self._joining else "has left the others"
                raise RankError(f"{kind} {name!r}: this rank {why}")
            self._pending += requests
            self._changed.notify()
        return [request.future for request in requests]

    def _request(self, work: Callable[[], Any], kind: str, name: str) -> Request:
        """Returns the request to run `work`, with the text by which ranks compare it."""
        reduces = isinstance(work, Reduce)
        about = str(work) if reduces else f"{kind or 'call'} {name!r}"
        timeline = self._members.communicator.timeline
        if timeline is None or not kind:
            return Request(about, work)
        tensor = work.name if isinstance(work, Reduce) else name
        return Request(about, work, timeline.queued("ALLREDUCE" if reduces else kind, [tensor]))

    def join(self) -> int:
        """Lets this rank contribute zeros to allreduces until all ranks have called `join`. Returns
        the last rank that called it."""
        with self._changed:
            self._joining = Future()
            self._changed.notify()
        last = self._joining.result()
        self._joining = None
        return last

    def stop(self) -> None:
        """Ends the thread; collectives that still wait fail with RankError."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """The loop of the thread: waits for a request, sleeps for the cycle time, and runs a
        cycle."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._stopped or self._is_joining())
                if self._stopped:
                    break
            time.sleep(self._knobs[1] / 1000)
            try:
                self._cycle()
            except Exception as error:  # whoever waits for a result hears of it
                self._fail(error)
        self._fail(RankError("this rank has left the others"))

    def _is_joining(self) -> bool:
        """True if this rank has called `join`, and some rank has not."""
        return self._joining is not None and not self._joining.done()

    def _fail(self, error: Exception) -> None:
        """Lets all waiting requests, and a waiting `join`, raise `error`."""
        with self._changed:
            pending, self._pending = self._pending, []
        for request in pending:
            request.future.set_exception(error)
        if self._joining is not None and not self._joining.done():
            self._joining.set_exception(error)

    def _cycle(self) -> None:
        """Exchanges with the other ranks which collectives are started, and runs the collectives
        that all ranks have started. If all ranks have joined, ends the `join` of this rank
        instead."""
        with self._changed:
            mine = None if self._is_joining() and not self._pending else self._pending[:]
        told = self._exchange(None if mine is None else [request.about for request in mine])
        for rank, abouts in enumerate(told):
            if abouts is None:
                self._joined.setdefault(rank)
        if len(self._joined) == len(told):
            last, self._joined = list(self._joined)[-1], {}
            assert self._joining is not None
            self._joining.set_result(last)
            return
        ready = self._agreed(told)
        if mine is None:
            requests = [Request(about, self._zeros(about)) for about in ready]
        else:
            requests = mine[: len(ready)]
            with self._changed:
                del self._pending[: len(ready)]
        here = self._members.communicator
        if here.timeline is not None:
            here.timeline.mark_cycle()
        try:
            self._execute(requests)
        except Exception as error:  # the callers raise it
            for request in requests:
                if not request.future.done():
                    request.future.set_exception(error)

    def _exchange(self, abouts: list[str] | None) -> list[list[str] | None]:
        """Tells all ranks which collectives this rank has started (`Request.about`), or None if it
        has joined. Returns the lists of all ranks, by rank. Every rank takes over the fusion
        threshold and the cycle time of rank 0."""
        payload = to_bytes([abouts, *self._knobs])
        name = f"cycle {self.count}"
        self.count += 1
        rows = collectives.gather_bytes(self._members.world, payload, name)
        every = [of_bytes(row) for row in rows]
        self._knobs = (every[0][1], every[0][2])
        return [row[0] for row in every]

    def _agreed(self, told: Sequence[list[str] | None]) -> list[str]:
        """Returns the collectives that all ranks have started (ranks that have joined do not
        count): the common start of the lists in `told`. It has the list of each rank, or None for a
        rank that has joined. Errors: RankError, on every rank, if the lists differ in their common
        length."""
        active = [(rank, abouts) for rank, abouts in enumerate(told) if abouts is not None]
        count = min(len(abouts) for _, abouts in active)
        first_rank, first = active[0]
        for rank, abouts in active[1:]:
            for mine, theirs in zip(first[:count], abouts[:count], strict=True):
                if mine != theirs:
                    message = (
                        f"the ranks disagree: rank {first_rank} runs {mine}, rank {rank} runs "
                        f"{theirs}"
                    )
                    self._members.communicator.world.abort(message)
                    raise RankError(message)
        return first[:count]

    def _zeros(self, about: str) -> Callable[[], Any]:
        """Returns the work with which a rank that has joined takes part in the collective `about`:
        an allreduce of zeros; nothing for another collective."""
        zeros = Reduce.parse(self._members, about)
        return zeros if zeros is not None else lambda: None

    def _execute(self, requests: Sequence[Request]) -> None:
        """Runs requests in their order; consecutive allreduces run together. Reports the speed to
        the tuner, if this rank has a tuner."""
        began, sent, start = time.perf_counter(), 0, 0
        while start < len(requests):
            end = start
            while end < len(requests) and isinstance(requests[end].work, Reduce):
                end += 1
            if end == start:
                self._execute_alone(requests[start])
                end += 1
            else:
                works = [request.work for request in requests[start:end]]
                sent += self._execute_together(works, requests[start:end])
            start = end
        if self._tune is not None and sent:
            self._knobs = self._tune.record(sent, time.perf_counter() - began, self._knobs)

    def _execute_alone(self, request: Request) -> None:
        """Runs one collective that is not an allreduce. Fails its future if a rank has joined."""
        if self._joined:
            names = ", ".join(map(str, self._joined))
            request.future.set_exception(
                InputError(f"{request.about}: ranks have joined, which can only reduce: {names}")
            )
            return
        try:
            with request.started():
                result = request.work()
            request.future.set_result(result)
        except Exception as error:  # the caller raises it
            request.future.set_exception(error)

    def _execute_together(self, works: Sequence[Any], requests: Sequence[Request]) -> int:
        """Runs allreduces in fused buffers, and sets the futures of the requests. `works` are the
        `Reduce` of each request. Returns the number of bytes sent."""
        with ExitStack() as stack:
            for request in requests:
                stack.enter_context(request.started())
            results, buffers = reduced_together(self._members, works, self._knobs[0])
        self.buffers += buffers
        for request, work, result in zip(requests, works, results, strict=True):
            try:
                request.future.set_result(work.finish(result))
            except Exception as error:  # the caller raises it
                request.future.set_exception(error)
        return sum(work.wire.nbytes for work in works)
