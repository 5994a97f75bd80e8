"""Finds or makes the sharded training step for a number of ranks: the one that a run began with, or
another, sharded from the same model with the same options."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnxpar.base.errors import InputError, ModelError, StrategyError
from onnxpar.base.write_file import make_folders, writing
from onnxpar.planner.request import model_digest, requests_for
from onnxpar.runtime.session.bundle import Bundle

_WITHOUT = "topology"
"""The option that may list a device for each rank, and so fits no other number of ranks."""


class StepPlans:
    """Finds or makes the folder of a training step that is sharded for a given number of ranks.

    par     the folder that `onnxpar shard` wrote
    folder  where further folders are put, under names such as `ranks_0003.par`
    model   the step that was sharded; default: the file of its name beside `par`
    tell    called with a line when a step is sharded

    Errors: InputError if the step cannot be sharded again.
    """

    def __init__(
        self,
        par: Path,
        folder: Path,
        model: str | os.PathLike[str] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._bundle = bundle = Bundle.load(par)
        self._folder, self._tell = folder, tell
        if bundle.data.get("request") is None:
            raise InputError(
                f"{par} does not say how it was made, so that it cannot be made for fewer ranks; "
                "write it again with `onnxpar shard`, whose options must not be objects of Python "
                "(a manual program has its own number of ranks)"
            )
        self._request: dict[str, Any] = bundle.data["request"]
        self._model = par.parent / self._request["file"] if model is None else Path(model)
        self._shorter: dict[str, str] = self._request.get("shorter") or {}
        """The digests of the same step for shorter samples, by path from the step's folder."""
        for file in (self._model, *self._beside):
            if not file.is_file():
                raise InputError(
                    f"{file} is not there, of which {par} was made; give the step with --step, to "
                    "shard it for fewer ranks"
                )
        self._check_model()

    @property
    def _beside(self) -> list[Path]:
        """The files of the step for shorter samples."""
        return [self._model.parent / name for name in self._shorter]

    def at_most(self, ranks: int, least: int) -> Path:
        """Returns the folder of the step for `ranks` ranks. If the step cannot be sharded for that
        number, returns the folder for the next smaller number, down to `least`.

        Errors: StrategyError if it cannot be sharded for any of them; ModelError if the model has
        changed.
        """
        reason = ""
        for count in range(ranks, least - 1, -1):
            if count == self._bundle.mesh.size:
                return self._bundle.path
            try:
                return self._for(count)
            except StrategyError as error:
                reason = reason or str(error)
                self._tell(f"{self._model} has no plan for {count} ranks: {error}")
        raise StrategyError(
            f"{self._model} has no plan for {least} to {ranks} ranks, by the request of "
            f"{self._bundle.path}: {reason}"
        )

    def _for(self, ranks: int) -> Path:
        """Returns the folder for exactly `ranks` ranks; shards the step unless the folder exists.
        Errors: StrategyError."""
        # A pass imports onnxpar.training, whose entrance imports this module.
        from onnxpar.planner.convert_options import options_of
        from onnxpar.planner.sharder import shard

        target = self._folder / f"ranks_{ranks:04d}.par"
        tries = self._requests(ranks)
        if self._is_made(target, tries):
            return target
        self._check_model()
        with writing(self._folder):
            make_folders(self._folder)
        failed: StrategyError | None = None
        for request in tries:
            self._tell(f"sharding {self._model} for {ranks} ranks")
            try:
                shard(self._model, target, options_of(request), shorter=self._beside)
            except StrategyError as error:
                failed = failed or error
            else:
                return target
        assert failed is not None, "there is a request for every number of ranks"
        raise failed

    def _requests(self, ranks: int) -> list[dict[str, Any]]:
        """Returns the sets of options to try for `ranks` ranks: first with all options, then
        without `topology`."""
        mesh = self._bundle.mesh
        requests = list(requests_for(self._request["options"], mesh, ranks))
        bare = [{n: v for n, v in one.items() if n != _WITHOUT} for one in requests]
        return requests + (bare if bare != requests else [])

    def _is_made(self, target: Path, tries: list[dict[str, Any]]) -> bool:
        """True if the folder `target` has the complete step, sharded with one of the sets of
        options `tries`."""
        try:
            bundle = Bundle.load(target)
            bundle.files.check_complete()
        except ModelError:
            return False
        request = bundle.data.get("request") or {}
        parts = "sha256", "shorter"
        same = [request.get(part) for part in parts] == [self._request.get(part) for part in parts]
        return same and request.get("options") in tries

    def _check_model(self) -> None:
        """Checks that the model file is the one that was sharded. Errors: ModelError."""
        digests = [self._request["sha256"], *self._shorter.values()]
        for file, digest in zip((self._model, *self._beside), digests, strict=True):
            if model_digest(file) != digest:
                raise ModelError(
                    f"{file} is not the model of which {self._bundle.path} was made, or has "
                    "changed since; give that one with --step, or shard this one again"
                )
