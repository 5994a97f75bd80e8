"""One rank of a session, in the process of a Ray actor on the rank's host."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ray.util import get_node_ip_address

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests
from onnxpar.base.errors import ModelError, OnnxparError
from onnxpar.base.own_folder import OwnFolder
from onnxpar.runtime.profile.profile import Record
from onnxpar.runtime.ranks.arena import Heap
from onnxpar.runtime.ranks.cores import own_cores, share_beside
from onnxpar.runtime.ranks.executor import Executor, Facts
from onnxpar.runtime.ranks.fetch import complete
from onnxpar.runtime.ranks.groups import Hub, World
from onnxpar.runtime.ranks.log import describe, log
from onnxpar.runtime.ranks.planned_run import KeptShapes, Request
from onnxpar.runtime.session.bundle import Sizes
from onnxpar.runtime.session.checks import check_table_dir
from onnxpar.runtime.session.options import SessionSpec
from onnxpar.runtime.session.shards import Rows
from onnxpar.runtime.states.state_files import Origin

TLS_DIR, INSECURE = NETWORK = "ONNXPAR_TLS_DIR", "ONNXPAR_INSECURE"
"""Variables of the environment: one must be set where other hosts can reach a rank."""


class Place(NamedTuple):
    """Where an actor runs.

    host         the name of its host
    address      the address of its host in the cluster
    pid          its process
    may_connect  True if its environment has certificates, or says that the network is trusted
    """

    host: str
    address: str
    pid: int
    may_connect: bool


@dataclass(frozen=True)
class Joining:
    """The settings with which a rank connects with the other ranks.

    size          the number of ranks
    local_size    the number of ranks on its host
    store         the address at which ranks find each other, with the secret of this session
    bind_address  the interface to listen on; if empty, that of the route to rank 0
    timeout       the longest wait in seconds
    threads       the number of threads that the rank may use
    """

    size: int
    local_size: int
    store: str
    bind_address: str
    timeout: float
    threads: int


@dataclass(frozen=True)
class Answer:
    """The answer of a rank to a call.

    result  the result
    kept    the global shapes of the states that the rank has kept in the call
    error   the text of an error, after which the rank can go on; empty if there is none
    """

    result: Any = None
    kept: KeptShapes = field(default_factory=dict)
    error: str = ""


class RankActor:
    """A rank. `answer` takes one call at a time; `ping`, `stop` and `place` may be called while it
    computes.

    rank       its number
    variables  variables to set in the environment of the process
    """

    def __init__(self, rank: int, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)  # the plugin reads them when the rank joins its world
        self._rank = rank
        self._calls = 0
        self._hub: Hub | None = None
        self._recordings: OwnFolder | None = None

    def place(self) -> Place:
        """Returns where this rank runs."""
        may_connect = any(map(os.environ.get, NETWORK))
        return Place(socket.gethostname(), get_node_ip_address(), os.getpid(), may_connect)

    def meet(self, address: str) -> str:
        """Makes this process the one to which all ranks connect first, at a free port of `address`,
        an address of this host. Returns the address with port and the secret of this session.
        Errors: RankError."""
        self._hub = Hub(address)
        return self._hub.store

    def start(self, path: str, digest: str, spec: SessionSpec, joining: Joining) -> Facts:
        """Connects with the other ranks, reads this rank's files, and loads its graph; returns what
        the session wants to know of the rank.

        path    the folder of the sharded model on this host; missing files are fetched from other
                ranks
        digest  that of plan.json on the session's host

        Errors: ModelError if no rank has a file, or if the plan has another digest; RankError if
        another rank does not start.
        """
        if spec.profile:  # the session's folder is on its own host
            self._recordings = OwnFolder()
            spec = replace(spec, profile=str(self._recordings.path))
        self._world = World.create(
            "ray", self._rank, joining.size, joining.store, joining.bind_address, joining.timeout
        )
        spin = share_beside(joining.local_size, own_cores()).spin
        try:
            bundle = complete(Path(path), self._world)
            if bundle.digest != digest:
                raise ModelError(
                    f"{path} is not the model that the session was made for: the SHA-256 of "
                    f"plan.json begins with {bundle.digest[:8]} here and {digest[:8]} there; copy "
                    "one folder to all hosts"
                )
            spec = replace(spec, table_dir=check_table_dir(bundle, spec.table_dir))
            self._executor = Executor(bundle, self._world, spec, joining.threads, spin)
        except Exception as error:  # the outermost boundary of a rank: the others wait for it
            self._world.abort(f"rank {self._rank} failed: {describe(error)}")
            raise
        return dict(self._executor.facts())

    def answer(self, do: str, feeds: Mapping[str, Array], *given: Any) -> Answer:
        """Calls the method `_{do}` of this rank, with its shards of inputs and with `given`;
        returns the result or the error. An error interrupts the call on all ranks; the rank is
        usable again after `renew`."""
        self._calls += 1
        if do != "undo":
            self._executor.settle()
        try:
            result, kept = getattr(self, f"_{do}")(feeds, *given), {}
            if do == "run":
                kept = self._executor.kept_shapes
            return Answer(result, kept)
        except Exception as error:  # the outermost boundary of a call: the other ranks wait for it
            log(error)
            text = describe(error)
            if not self._executor.stopped:
                self._world.interrupt(f"rank {self._rank} failed: {text}")
            return Answer(error=text)

    def renew(self) -> str:
        """Goes back to the states before the call that failed, once all ranks have left that call;
        returns the reason of the failure, which is equal on all ranks. Errors: RankError if a rank
        does not leave it."""
        self._calls += 1
        self._executor.undo()
        return self._world.renew()

    def ping(self) -> None:
        """Does nothing: the answer says that the process runs."""

    def stop(self, call: int) -> None:
        """Interrupts call number `call`, which has failed on another rank, if it still runs."""
        running = self._executor.running
        if running is not None and self._calls == call:
            self._executor.stop(running)

    def close(self) -> None:
        """Ends the session of this rank, and disconnects from the others."""
        del self._executor  # its kernels use the world
        self._world.close()
        if self._hub is not None:
            self._hub.close()
        if self._recordings is not None:
            self._recordings.close()

    def _run(self, feeds: Mapping[str, Array], request: Request) -> dict[str, Array]:
        slots = self._executor.run(request, feeds, Heap())
        return {name: slot.array for name, slot in slots.items()}

    def _read(self, _: Any, name: str, sizes: Sizes, rows: Rows) -> dict[str, Array]:
        slots = self._executor.read_state(name, Heap(), sizes, rows)
        return {name: slot.array for name, slot in slots.items()}

    def _write(self, feeds: Mapping[str, Array]) -> None:
        for name, part in feeds.items():
            self._executor.write_state(name, part)

    def _clear(self, _: Any, name: str, sizes: Sizes) -> None:
        self._executor.clear_state(name, sizes)

    def _reset(self, _: Any) -> None:
        self._executor.reset_states()

    def _undo(self, _: Any) -> None:
        self._executor.undo()

    def _save(self, _: Any, folder: str, sizes: Sizes) -> dict[str, Digests]:
        return self._executor.save_states(self._seen(folder), sizes)

    def _save_later(self, _: Any, folder: str, sizes: Sizes) -> None:
        self._executor.save_states_later(self._seen(folder), sizes)

    def _load(
        self, _: Any, folder: str, names: list[str], sizes: Sizes, origin: Origin | None
    ) -> None:
        self._executor.load_states(self._seen(folder), names, sizes, origin)

    def _profile(self, _: Any) -> Record:
        return self._executor.end_profile()

    def _seen(self, folder: str) -> Path:
        """Returns the path of a folder that all hosts share. Errors: OnnxparError if it does not
        exist on this host."""
        if not Path(folder).is_dir():
            raise OnnxparError(
                f"host {socket.gethostname()} does not see {folder}; give a folder that all hosts "
                "share"
            )
        return Path(folder)
