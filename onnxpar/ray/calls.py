"""Calls of all rank actors together: waits for their answers, and finds out which actor failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from onnxpar.base.errors import RankError, RunError
from onnxpar.ray.rank_actor import Answer, Place
from onnxpar.runtime.ranks.log import describe

CONTROL = "control"
"""The concurrency group of calls that are answered while a rank computes."""
GRACE = 2.0
"""Seconds in which Ray may still report the death of an actor, or the error of a rank, that made
another rank fail."""
CLOSING = 5.0
"""Seconds that ranks get to end by themselves when the session closes, before they are killed."""


@dataclass
class Actor:
    """The actor of a rank, as the driver of the session sees it.

    handle   Ray's handle of the actor
    place    where it runs, once that is known
    silence  seconds since its last sign of life
    ping     a question whether it is alive that is not answered yet
    """

    rank: int
    handle: Any
    place: Place | None = None
    silence: float = 0.0
    ping: Any = None

    @property
    def name(self) -> str:
        """The rank and its host, for errors."""
        if self.place is None:
            return f"rank {self.rank}"
        return f"rank {self.rank} on host {self.place.host} ({self.place.address})"


class Calls:
    """The actors of all ranks, in a placement group.

    If a call fails on one rank, all ranks abandon it and return to their state before the call. If
    an actor or its node dies, or does not respond for `timeout` seconds, all actors are killed, the
    placement group is removed, and every later call fails with the same reason. An actor responds
    even while its rank computes. `subject` names the model in errors.
    """

    def __init__(
        self, handles: Sequence[Any], group: PlacementGroup, timeout: float, subject: str
    ) -> None:
        self.actors = [Actor(rank, handle) for rank, handle in enumerate(handles)]
        self._group = group
        self._timeout = timeout
        self._tick = min(1.0, timeout / 8)
        self._subject = subject
        self._calls = 0
        self._closed: str | None = None

    def check_usable(self) -> None:
        """Errors: RankError if the session is closed."""
        if self._closed is not None:
            raise RankError(f"this session is closed: {self._closed}; make a new one")

    def check_alive(self) -> None:
        """Errors: RankError if an actor has died or does not respond; all actors are then
        killed."""
        self.each(lambda a: _control(a, "ping"), "a check")

    def answers(self, send: Callable[[Actor], Any], what: str) -> list[Answer]:
        """Returns the answers of all ranks to a call, in the order of ranks. `send` makes the call
        to an actor, and `what` names it in errors.

        Errors: RunError if the call failed but the ranks can continue; else RankError, which names
        the rank that failed, its host, and the call; Ray's error is its cause.
        """
        self._calls += 1
        answers: list[Answer] = self.each(send, what, self._stop_others)
        if any(answer.error for answer in answers):
            self._calls += 1
            reason = self.each(lambda a: a.handle.renew.remote(), what)[0]
            raise RunError(f"{what} of {self._subject}: {reason}")
        return answers

    def each(
        self,
        send: Callable[[Actor], Any],
        what: str,
        seen: Callable[[Any, Sequence[Actor]], None] = lambda result, waiting: None,
        ranks: int | None = None,
    ) -> list[Any]:
        """Returns the results of a task on each actor, or on the first `ranks`, in the order of
        ranks.

        send   starts the task on an actor
        what   names the task in errors
        seen   called with each result when it comes, and with the actors that still compute

        Errors: as of `answers`; all actors are then killed.
        """
        self.check_usable()
        complete = False
        try:
            results = self._each(send, what, seen, self.actors[:ranks])
            complete = True
        finally:
            if not complete:
                self.end(f"{what} failed")
        return results

    def _each(
        self,
        send: Callable[[Actor], Any],
        what: str,
        seen: Callable[[Any, Sequence[Actor]], None],
        actors: Sequence[Actor],
    ) -> list[Any]:
        """Returns the results of a task on each of these actors, in order; `each` says what the
        arguments are. Errors: RankError if one fails."""
        for actor in actors:
            actor.silence, actor.ping = 0.0, None
        waiting = {send(actor): actor for actor in actors}
        results: list[Any] = [None] * len(actors)
        while waiting:
            before = time.monotonic()
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=self._tick)
            for task in done:
                actor = waiting.pop(task)
                try:
                    results[actor.rank] = ray.get(task)
                except RayError as error:
                    self._fail({actor.rank: error}, waiting, what)
                seen(results[actor.rank], list(waiting.values()))
            if not done:
                self._listen(waiting, min(time.monotonic() - before, 2 * self._tick), what)
        return results

    def _listen(self, waiting: dict[Any, Actor], seconds: float, what: str) -> None:
        """Adds `seconds` to the silence of actors that have not answered, and asks them for a sign
        of life. Errors: RankError if one is silent for too long. Callers pass at most two ticks:
        this process may itself have been stopped for longer."""
        for actor in waiting.values():
            if actor.ping is not None:
                answered, _ = ray.wait([actor.ping], timeout=0)
                actor.silence = 0.0 if answered else actor.silence + seconds
            if actor.silence >= self._timeout:
                text = f"{actor.name} has not answered for {actor.silence:.1f} s"
                self._fail({actor.rank: GetTimeoutError(text)}, waiting, what)
            if actor.ping is None or not actor.silence:
                actor.ping = _control(actor, "ping")

    def _stop_others(self, answer: Answer, waiting: Sequence[Actor]) -> None:
        """Tells the actors that still compute (`waiting`) to abandon the call, if it has failed on
        another."""
        if answer.error:
            for actor in waiting:
                _control(actor, "stop", self._calls)

    def _fail(self, errors: dict[int, RayError], waiting: dict[Any, Actor], what: str) -> NoReturn:
        """Ends all actors, and raises the error of the rank to blame: one whose actor has died,
        else one whose error is its own, else the one that failed first. Waits shortly for further
        errors. Errors: RankError, always."""
        deadline = time.monotonic() + GRACE
        while waiting and not any(map(_weight, errors.values())):
            left = max(deadline - time.monotonic(), 0.0)
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
            if not done:
                break
            actor = waiting.pop(done[0])
            try:
                ray.get(done[0])
            except RayError as later:
                errors[actor.rank] = later
        rank = culprit(errors)
        text = f"{what} of {self._subject}: {_story(self.actors[rank], errors[rank])}"
        self.end(text)
        raise RankError(text) from errors[rank]

    def close(self) -> None:
        """Ends all ranks without an error. May be called twice."""
        if self._closed is None and ray.is_initialized():
            tasks = [actor.handle.close.remote() for actor in self.actors]
            ray.wait(tasks, num_returns=len(tasks), timeout=CLOSING)
        self.end("close() was called")

    def end(self, reason: str) -> None:
        """Kills all actors, and removes the placement group. Later calls fail with `reason`; a
        second `end` does nothing."""
        if self._closed is not None:
            return
        self._closed = reason
        if ray.is_initialized():  # else they have ended with the connection to the cluster
            remove_placement_group(self._group)  # which kills the actors in it


def _control(actor: Actor, method: str, *given: Any) -> Any:
    """Calls a method of an actor that it answers also while its rank computes."""
    return getattr(actor.handle, method).options(concurrency_group=CONTROL).remote(*given)


def culprit(errors: Mapping[int, RayError]) -> int:
    """Returns the rank whose error is the cause of the others; of several, the first in
    `errors`."""
    return max(errors, key=lambda rank: _weight(errors[rank]))


def _weight(error: RayError) -> int:
    """Returns 2 if an actor has died, 1 for an error of the rank itself, and 0 for the consequence
    of another rank's error: a rank that waits for one that fails gets a RankError from its
    collective."""
    if isinstance(error, RayActorError):
        return 2
    return int(isinstance(error, RayTaskError) and not isinstance(error.cause, RankError))


def _story(actor: Actor, error: RayError) -> str:
    """Returns a sentence that says how a rank failed."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return f"{actor.name} failed: {describe(error.cause)}"
    if isinstance(error, RayActorError):
        return f"{actor.name} died: {error}"
    return str(error) if isinstance(error, GetTimeoutError) else f"{actor.name} failed: {error}"
