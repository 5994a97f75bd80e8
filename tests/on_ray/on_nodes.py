"""Sessions on a cluster's nodes, and what is left of them."""

from __future__ import annotations

from typing import Any

from onnxpar.runtime.session.session import Session

TIMEOUT = 60.0


def actors(strategy: str = "SPREAD", **options: Any) -> Any:
    """Where ranks run: on both nodes, which this machine's network connects."""
    from onnxpar.ray import Actors

    return Actors(strategy=strategy, insecure=True, **options)


def pids(session: Session) -> list[int]:
    """The processes of a session's ranks, in their order."""
    return [actor.place.pid for actor in session._ranks._calls.actors]


def groups() -> list[dict[str, Any]]:
    """The placement groups that are not removed."""
    from ray.util.placement_group import placement_group_table

    every = placement_group_table().values()
    return [group for group in every if group["state"] != "REMOVED"]
