"""What sees a plan being made: each rewrite of the loader, each pass, each prediction of costs."""

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
    """Sees nothing; its subclasses override the methods for what they see.

    A model may be planned in several attempts: each is seen by an observer of its own, which
    `begin` returns, and `keep` takes over what was seen of the plan that was chosen. `priced_at`
    are the sizes at which costs are to be predicted, if not at the typical ones; `takes_time` is
    true if the time of the observer is a row of --time-passes.
    """

    priced_at: Sequence[Profile] = ()
    takes_time = False

    def begin(self: Own) -> Own:
        """An observer of one attempt, which has seen the same of the loader. The default is a
        shallow copy, so that methods must replace collections, not change them."""
        return copy.copy(self)

    def keep(self: Own, attempt: Own) -> None:
        """Takes over what the observer of an attempt has seen."""
        vars(self).update(vars(attempt))

    def loading(self, name: str, graph: onnx.ModelProto | gs.Graph) -> None:
        """Called after each rewrite of the loader, with its name and what it leaves; the first one
        is called `read`."""

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        """Called after each pass, also after one that failed."""

    def priced(self, weight: float, graph: gs.Graph, ctx: PassContext) -> None:
        """Called for each of the sizes at which costs are predicted: with the weight of the sizes,
        and the graph after fuse-all-reduces."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, each: Sequence[Observer]) -> None:
        self.each = list(each)
        self.priced_at = next((o.priced_at for o in each if o.priced_at), ())
        self.takes_time = any(observer.takes_time for observer in each)

    def begin(self) -> Observers:
        return Observers([observer.begin() for observer in self.each])

    def keep(self, attempt: Observers) -> None:
        for observer, seen in zip(self.each, attempt.each, strict=True):
            observer.keep(seen)

    def loading(self, name: str, graph: onnx.ModelProto | gs.Graph) -> None:
        for observer in self.each:
            observer.loading(name, graph)

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        for observer in self.each:
            observer.passed(step, model, ctx)

    def priced(self, weight: float, graph: gs.Graph, ctx: PassContext) -> None:
        for observer in self.each:
            observer.priced(weight, graph, ctx)
