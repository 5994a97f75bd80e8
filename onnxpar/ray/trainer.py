"""A trainer whose ranks are actors of a Ray cluster."""

from __future__ import annotations

import os
from typing import Any

from onnxpar.base.folder_lock import FolderLock
from onnxpar.ray.actors import Actors
from onnxpar.trainer import trainer


class Trainer(trainer.Trainer):
    """`onnxpar.training.Trainer` with one actor per rank. Checkpoints are in a folder that this
    host and all nodes of the ranks share.

    par      the folder of the sharded step, as for `InferenceSession`
    actors   where ranks run, and with how many CPUs
    held      the lock of the checkpoint folder, if the caller has locked it already
    options  those of `InferenceSession`

    `onnxpar.training.train(..., start_ranks=Actors())` runs a whole training. Errors: as of
    `onnxpar.training.Trainer`, and of `InferenceSession`.
    """

    def __init__(
        self,
        par: str | os.PathLike[str],
        *,
        actors: Actors | None = None,
        held: FolderLock | None = None,
        **options: Any,
    ) -> None:
        super().__init__(par, held=held, start_ranks=actors or Actors(), **options)
