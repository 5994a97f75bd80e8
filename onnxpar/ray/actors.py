"""Places the ranks of a session on a Ray cluster, and starts them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from onnxpar.base.errors import InputError, RankError
from onnxpar.ray.actor_ranks import ActorRanks
from onnxpar.ray.calls import CONTROL, Actor, Calls
from onnxpar.ray.rank_actor import INSECURE, TLS_DIR, Joining, RankActor
from onnxpar.runtime.launch.launch import LOOPBACK, launched_rank
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.options import SessionSpec

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def connect() -> None:
    """Connects this process to Ray by `ray.init()`, unless it is connected."""
    if not ray.is_initialized():
        ray.init()


@dataclass(frozen=True)
class Actors:
    """How to start the ranks of a session as actors of a Ray cluster: a value for the argument
    `start_ranks` of `onnxpar.InferenceSession`.

    cpus       CPUs of each rank, which is also its number of threads
    resources  what a rank needs besides, by Ray's names: {"memory": 4e9}
    strategy   Ray's strategy of placement: PACK (few nodes), SPREAD (many), STRICT_PACK (one) or
               STRICT_SPREAD (a node for each rank)
    interface  the interface, or its address, that ranks listen on; default: that of the route to
               rank 0
    tls_dir    a folder of each host with ca.crt, tls.crt and tls.key, to encrypt connections
    insecure   True to let ranks of several nodes connect without `tls_dir`, in a network that you
               trust

    Ranks of one node have neighbouring numbers. Each rank reads its own files in the folder of the
    sharded model on its node, after fetching missing files from ranks that have them. Errors:
    InputError for a wrong value.
    """

    cpus: float = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "PACK"
    interface: str | None = None
    tls_dir: str | os.PathLike[str] | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.cpus <= 0:
            raise InputError(f"cpus is {self.cpus}; a rank needs some, such as 1")
        if self.strategy not in STRATEGIES:
            raise InputError(f"strategy is {self.strategy!r}; give one of {', '.join(STRATEGIES)}")
        if "CPU" in self.resources:
            raise InputError("resources has CPU; give cpus instead")

    def __call__(self, bundle: Bundle, spec: SessionSpec, timeout: float) -> ActorRanks:
        """Starts the ranks of a sharded model, and returns them.

        spec     the settings of the session
        timeout  longest wait for the cluster and for another rank, in seconds

        Errors: RankError if the cluster has no room for the ranks in time, if one does not start,
        or if a launcher has started this process as a rank.
        """
        launched = launched_rank()
        if launched is not None:
            raise RankError(
                f"a launcher started this process as rank {launched.rank} of {launched.size}, "
                "and start_ranks starts ranks elsewhere: leave out one of them"
            )
        connect()
        size = bundle.mesh.size
        group = placement_group([self._of_rank] * size, strategy=self.strategy)
        try:
            if not group.wait(timeout):
                raise RankError(self._no_room(bundle, timeout))
            handles, local_sizes = self._place(group, size)
        except BaseException:
            remove_placement_group(group)
            raise
        calls = Calls(handles, group, timeout, str(bundle.path))
        store = self._meet(calls, max(local_sizes) == size)

        def start(actor: Actor) -> Any:
            joining = Joining(
                size,
                local_sizes[actor.rank],
                store,
                self.interface or "",
                timeout,
                max(1, int(self.cpus)),
            )
            path = str(bundle.path.resolve())
            return actor.handle.start.remote(path, bundle.digest, spec, joining)

        return ActorRanks(bundle, calls, calls.each(start, "the start")[0])

    @property
    def _of_rank(self) -> dict[str, float]:
        """The resources of a rank, by Ray's names."""
        return {"CPU": self.cpus, **self.resources}

    def _place(self, group: PlacementGroup, size: int) -> tuple[list[Any], list[int]]:
        """Makes an actor for each rank in a placement group, so that ranks of one node have
        neighbouring numbers. Returns the actors, and for each rank the number of ranks on its
        node."""
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        each = [nodes[bundle] for bundle in range(size)]
        order = sorted(range(size), key=lambda bundle: (each.index(each[bundle]), bundle))
        others = {n: v for n, v in self.resources.items() if n != "memory"}
        cls = ray.remote(concurrency_groups={CONTROL: 1})(RankActor)
        handles = [
            cls.options(
                num_cpus=self.cpus,
                memory=self.resources.get("memory"),
                resources=others,
                max_restarts=0,  # a new process would lack the states of its rank
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            ).remote(rank, self._variables)
            for rank, bundle in enumerate(order)
        ]
        return handles, [each.count(each[bundle]) for bundle in order]

    def _meet(self, calls: Calls, is_one_node: bool) -> str:
        """Asks all actors where they run, and makes rank 0 the one to which the others connect.
        Returns the address at which they find each other, with the secret of this session. Errors:
        RankError if connections between nodes would not be encrypted."""
        places = calls.each(lambda a: a.handle.place.remote(), "the start")
        for actor, place in zip(calls.actors, places, strict=True):
            actor.place = place
        closed = next((a for a in calls.actors if a.place and not a.place.may_connect), None)
        if closed is not None and not is_one_node:
            text = (
                f"{closed.name} would not encrypt its connections to ranks of other nodes; give "
                "Actors a tls_dir or, in a network that you trust, insecure=True"
            )
            calls.end(text)
            raise RankError(text)
        address = LOOPBACK if is_one_node else places[0].address
        return str(calls.each(lambda a: a.handle.meet.remote(address), "the start", ranks=1)[0])

    @property
    def _variables(self) -> dict[str, str]:
        """The variables of the environment of each actor that tell the plugin how to secure
        connections."""
        found = {}
        if self.tls_dir is not None:
            found[TLS_DIR] = os.fspath(self.tls_dir)
        if self.insecure:
            found[INSECURE] = "1"
        return found

    def _no_room(self, bundle: Bundle, timeout: float) -> str:
        """Returns the text of the error that the cluster has no room for the ranks."""
        has = {n: v for n, v in ray.cluster_resources().items() if n in self._of_rank}
        return (
            f"{bundle.path} needs {bundle.mesh.size} times {self._of_rank} ({self.strategy}), and "
            f"the Ray cluster had no room for them within {timeout:g} s: it has {has} in all; add "
            "nodes, end what uses them, or shard the model for fewer ranks"
        )
