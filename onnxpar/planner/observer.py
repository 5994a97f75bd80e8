"""The interface of observers, which see how a plan is made: each rewrite of the loader, each pass,
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
    """Sees how a plan is made; the base class does nothing, subclasses override methods.

    A planner may plan a model in several attempts: `begin` returns an observer for each attempt,
    and `keep` takes over the state of the observer of the chosen attempt.

    priced_at   the sizes at which this observer needs costs; empty: the typical sizes
    takes_time  True if --time-passes should count the observer's time in a row of its own
    """

    priced_at: Sequence[Profile] = ()
    takes_time = False

    def begin(self: Own) -> Own:
        """Returns the observer of one attempt, which begins with this observer's state after
        loading. By default, a shallow copy; so methods must replace collections, not change them.
        """
        return copy.copy(self)

    def keep(self: Own, attempt: Own) -> None:
        """Takes over the state of the observer of the chosen attempt."""
        vars(self).update(vars(attempt))

    def loading(self, name: str, graph: onnx.ModelProto | gs.Graph) -> None:
        """Called after each rewrite of the loader, with its name and its result; the first one is
        "read"."""

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        """Called after each pass, also after one that failed."""

    def priced(self, weight: float, graph: gs.Graph, ctx: PassContext) -> None:
        """Called with the graph after fuse-all-reduces at each of the sizes for which costs are
        predicted; `weight` is the share of runs with these sizes."""


class Observers(Observer):
    """Several observers that act as one."""

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
