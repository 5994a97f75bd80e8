"""Reads a model once, for all attempts to plan it."""

from __future__ import annotations

from pathlib import Path

from onnxpar.base.pass_times import LOAD
from onnxpar.graph.tensors import Whole
from onnxpar.load.load import Model, Show, unseen
from onnxpar.planner.balance import sampled_remainders
from onnxpar.planner.context import load_model
from onnxpar.planner.options import Options, least_size
from onnxpar.planner.placed_tables import tables_on_host
from onnxpar.strategy.manual import MANUAL


class Loader:
    """Reads the model of a file when it is first asked for it, and again only for options that
    change what the loader does. `show` is called after each rewrite of the loader."""

    def __init__(self, path: str | Path, show: Show = unseen) -> None:
        self.path = Path(path)
        self._show = show
        self._options: Options | None = None
        self._model: Model | None = None

    def model(self, options: Options, whole: Whole | None = None) -> Model:
        """The model, with a graph that nothing has changed yet, and with more nodes `whole`.
        Errors: OnnxparError."""
        options.objective.patience.tell("reading the model")
        if self._model is None or not self._serves(options):
            model = load_model(self.path, options, show=self._show)
            self._options, self._model = options, model.apart()
        else:
            with options.times.of(LOAD):
                model = self._model.fresh()
                model.on_host = tables_on_host(model, options.place, options.strategy)
        model.whole = {**model.whole, **(whole or {})}
        return model

    def _serves(self, options: Options) -> bool:
        """True if the loader makes of the model that was read what the options ask for."""
        assert self._model is not None and self._options is not None
        own = self._options
        is_open = self._model.sizes is not None
        return (
            MANUAL not in (own.preset, options.preset)
            and all(getattr(own, name) == getattr(options, name) for name in _LOADED)
            and (not is_open or _sampled(own) == _sampled(options))
        )


_LOADED = ("dims", "states", "find_states", "page_size", "kv_dtype", "part", "typical")
"""The options that the loader reads; and of open sizes, those that `_sampled` reads."""


def _sampled(options: Options) -> tuple[int, int]:
    """Where open sizes are sampled: the least size, and the remainders."""
    return least_size(options), sampled_remainders(options)
