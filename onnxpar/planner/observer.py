"""The interface for observers of a plan's making: of each rewrite of the loader, each pass, and
each prediction of costs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import onnx
import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.graph.typical import Profile
from onnxpar.load.load import Model

Own = TypeVar("Own", bound="Observer")


class Observer:
    """Observes nothing; its subclasses override methods.

    A planner may plan a model in several attempts: `begin` returns an observer for each attempt,
    and `keep` takes over the state of the chosen attempt's observer. `priced_at` are the sizes for
    which this observer needs costs, if these are not the typical sizes. `takes_time` is true if the
    time of the observer is a row of --time-passes.
    """

    priced_at: Sequence[Profile] = ()
    takes_time = False

    def begin(self: Own) -> Own:
        """An observer for one attempt, with this observer's state from the loader. The default is a
        shallow copy, so methods must replace collections, not change them."""
        return copy.copy(self)

    def keep(self: Own, attempt: Own) -> None:
        """Takes over the state of an attempt's observer."""
        vars(self).update(vars(attempt))

    def loading(self, name: str, graph: onnx.ModelProto | gs.Graph) -> None:
        """Called after each rewrite of the loader, with its name and its result; the first is
        called `read`."""

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        """Called after each pass, also after a pass that failed."""

    def priced(self, weight: float, graph: gs.Graph, ctx: PassContext) -> None:
        """Called for each of the sizes at which costs are predicted, with the weight of the sizes
        and the graph after fuse-all-reduces."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)
        self.priced_at = next((o.priced_at for o in observers if o.priced_at), ())
        self.takes_time = any(observer.takes_time for observer in observers)

    def begin(self) -> Observers:
        return Observers([observer.begin() for observer in self.observers])

    def keep(self, attempt: Observers) -> None:
        for observer, seen in zip(self.observers, attempt.observers, strict=True):
            observer.keep(seen)

    def loading(self, name: str, graph: onnx.ModelProto | gs.Graph) -> None:
        for observer in self.observers:
            observer.loading(name, graph)

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        for observer in self.observers:
            observer.passed(step, model, ctx)

    def priced(self, weight: float, graph: gs.Graph, ctx: PassContext) -> None:
        for observer in self.observers:
            observer.priced(weight, graph, ctx)
