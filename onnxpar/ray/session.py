"""A session whose ranks are actors of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onnxpar.ray.actors import Actors
from onnxpar.runtime.session import session

if TYPE_CHECKING:
    import onnxruntime as ort


class InferenceSession(session.InferenceSession):
    """`onnxpar.InferenceSession` with one actor per rank; this process sends global arrays and gets
    global arrays.

    path_or_bytes  a folder that `onnxpar shard` wrote, at the same path on this host, which reads
                   plan.json, and on the nodes of the ranks, each of which reads its own files;
                   ranks fetch files that their nodes lack from ranks that have them
    actors         where ranks run, and with how many CPUs
    options        those of `onnxpar.InferenceSession`, except options about processes of this host:
                   log_dir, bind_address, bind and ranks_per_numa

    Connects to Ray by `ray.init()` unless this process is connected. Errors: ModelError for a
    folder that is not a sharded model; RankError, with Ray's error as its cause, if an actor does
    not start, and later if an actor or its node dies; then all actors have ended.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: ort.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        actors: Actors | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            path_or_bytes,
            sess_options,
            providers,
            provider_options,
            start_ranks=actors or Actors(),
            **options,
        )
