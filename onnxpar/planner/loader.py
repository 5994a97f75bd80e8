"""Reads a model once, for all attempts to plan it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onnxpar.base.pass_times import LOAD
from onnxpar.graph.rewriting import Show, unseen
from onnxpar.graph.tensors import Whole
from onnxpar.load.load import Model
from onnxpar.load.loading import LoadRequest
from onnxpar.planner.context import load_model, load_request
from onnxpar.planner.options import Options
from onnxpar.planner.placed_tables import tables_on_host
from onnxpar.strategy.manual import MANUAL


class Loader:
    """Reads the model of a file once, and hands out a fresh graph for each attempt; reads again
    only for options that change what the loader does. `show` sees the model after each rewrite of
    the loader."""

    def __init__(self, path: str | Path, show: Show = unseen) -> None:
        self.path = Path(path)
        self._show = show
        self._request: LoadRequest | None = None
        self._model: Model | None = None

    def model(self, options: Options, whole: Whole | None = None) -> Model:
        """Returns the model with a fresh graph. `whole` has further factors of nodes that must stay
        whole. Errors: OnnxparError."""
        options.objective.patience.tell("reading the model")
        request = load_request(options)
        if options.preset == MANUAL:  # a program per rank: its types are not in the request
            model = load_model(self.path, options, show=self._show)
        elif self._model is None or not self._serves(request):
            model = load_model(self.path, options, show=self._show)
            self._request, self._model = request, model.apart()
        else:
            with options.times.of(LOAD):
                model = self._model.fresh()
                model.on_host = tables_on_host(model, options.place, options.strategy)
        model.whole = {**model.whole, **(whole or {})}
        return model

    def _serves(self, request: LoadRequest) -> bool:
        """True if the loaded model is what the loader would return for this request."""
        assert self._model is not None and self._request is not None
        before = self._request
        if self._model.sizes is None:  # then no sizes were sampled
            before = replace(before, least=request.least, remainders=request.remainders)
        return before == request
