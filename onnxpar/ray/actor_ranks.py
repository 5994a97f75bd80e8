"""The ranks of a session as actors of a Ray cluster: what a session asks of its ranks, as calls of
actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests
from onnxpar.ray.calls import Actor, Calls
from onnxpar.ray.rank_actor import Answer
from onnxpar.runtime.profile.profile import Record
from onnxpar.runtime.ranks.executor import Facts
from onnxpar.runtime.ranks.planned_run import KeptShapes, Request
from onnxpar.runtime.ranks.ranks import PartsOf, common_shapes
from onnxpar.runtime.session.bundle import Bundle, Sizes
from onnxpar.runtime.session.shards import PortParts, Rows
from onnxpar.runtime.states.state_files import Origin

SMALL = 64 << 10
"""Bytes up to which inputs travel within the call: through Ray's object store, they would take
longer. Ray itself puts arguments above 100 KiB there, once for each call."""


class ActorRanks:
    """The ranks of a session, an actor for each.

    bundle  the sharded model
    calls   calls all actors
    facts   what the actors have reported at their start

    Ranks that need the same shards of the inputs get one object of Ray's store, which travels to
    each node once; an actor reads it in place.
    """

    def __init__(self, bundle: Bundle, calls: Calls, facts: Facts) -> None:
        self.bundle = bundle
        self._parts = PortParts(bundle)
        self._calls = calls
        self._runs = 0
        self.facts = facts
        self.kept_shapes: KeptShapes = {}

    def memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns an array with any contents, for inputs."""
        return np.empty(shape, dtype)

    def run(self, request: Request, feeds: Mapping[str, Array]) -> PartsOf:
        """Runs all ranks once, and returns their shards of the outputs, by name and rank. Errors:
        RunError if the ranks can continue; else RankError, which names the rank and its host, and
        ends the session."""
        self._runs += 1
        handed = self._hand_over(feeds, request.sizes)
        answers = self._ask("run", f"run {self._runs}", handed, request)
        self.kept_shapes = common_shapes([answer.kept for answer in answers])
        return _parts(answers)

    def read_state(self, name: str, sizes: Sizes, rows: Rows = None) -> PartsOf:
        """Returns the shards of a state, by name and rank; `rows` limits them to these rows of
        each."""
        return _parts(self._ask("read", f"reading state {name!r}", None, name, sizes, rows))

    def write_state(self, name: str, array: Array, sizes: Sizes) -> None:
        """Sends each rank its shard of a global array, which the rank keeps as a state."""
        self._ask("write", f"writing state {name!r}", self._hand_over({name: array}, sizes))

    def clear_state(self, name: str, sizes: Sizes) -> None:
        """Lets each rank keep zeros as its shard of a state."""
        self._ask("clear", f"clearing state {name!r}", None, name, sizes)

    def save_states(self, folder: str, sizes: Sizes) -> dict[str, Digests]:
        """Lets each rank write its shards of all states to a folder that all hosts share; returns
        the digests of the files, by name."""
        answers = self._ask("save", f"saving states to {folder}", None, folder, sizes)
        return {name: digests for a in answers for name, digests in a.result.items()}

    def save_states_later(self, folder: str, sizes: Sizes) -> None:
        """Lets each rank copy its shards of all states at once, and write the copies to a folder
        while it goes on."""
        self._ask("save_later", f"copying states for {folder}", None, folder, sizes)

    def load_states(
        self, folder: str, names: Sequence[str], sizes: Sizes, origin: Origin | None = None
    ) -> None:
        """Lets each rank read its shards of these states from a folder that all hosts share, and
        keep them."""
        what = f"loading states from {folder}"
        self._ask("load", what, None, folder, list(names), sizes, origin)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns [payload]: there are no other processes that drive the session, with which to
        exchange payloads."""
        return [payload]

    def write_log(self, text: str) -> None:
        """Does nothing: Ray keeps what actors print, so a session has no `log_dir`."""

    def reset_states(self) -> None:
        """Lets all ranks forget all states."""
        self._ask("reset", "the reset of states", None)

    def undo_states(self) -> None:
        """Lets all ranks go back to the states before the last run."""
        self._ask("undo", "undoing a run", None)

    def end_profile(self) -> Sequence[Record]:
        """Ends the recording of a profile, and returns the record of each rank."""
        return [answer.result for answer in self._ask("profile", "the profile", None)]

    def check_usable(self) -> None:
        """Errors: RankError if the ranks have ended."""
        self._calls.check_usable()

    def check_alive(self) -> None:
        """Errors: RankError if an actor has died or does not respond."""
        self._calls.check_alive()

    def close(self) -> None:
        """Ends the actors, and removes their placement group."""
        self._calls.close()

    def _ask(self, do: str, what: str, feeds: Sequence[Any] | None, *given: Any) -> list[Answer]:
        """Calls the method `do` of all actors, with `given`, and returns their answers. `what`
        names the call in errors; `feeds` has the inputs of each rank, as `_hand_over` returns
        them."""

        def send(actor: Actor) -> Any:
            own = {} if feeds is None else feeds[actor.rank]
            return actor.handle.answer.remote(do, own, *given)

        return self._calls.answers(send, what)

    def _hand_over(self, feeds: Mapping[str, Array], sizes: Sizes) -> list[Any]:
        """Returns the shards of the inputs for each rank: arrays by name, or an object of Ray's
        store with them. Ranks whose shards are equal share an object."""
        self.check_usable()
        parts = self._parts.at(sizes)
        handed: dict[tuple[int, ...], Any] = {}
        found = []
        for rank in range(len(self._calls.actors)):
            origins = tuple(parts[name].origins[rank] for name in feeds)
            if origins not in handed:
                own = {name: parts[name].take(array, rank) for name, array in feeds.items()}
                size = sum(a.nbytes for a in own.values() if isinstance(a, np.ndarray))
                handed[origins] = own if size <= SMALL else ray.put(own)
            found.append(handed[origins])
        return found


def _parts(answers: Sequence[Answer]) -> PartsOf:
    """Returns the shards in the ranks' answers, by name and rank."""
    found: PartsOf = {}
    for rank, answer in enumerate(answers):
        for name, part in answer.result.items():
            found.setdefault(name, {})[rank] = part
    return found
