"""An observer of plans that calls a function after each pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.load.load import Model
from onnxpar.planner.observer import Observer


@dataclass
class Watching(Observer):
    """Calls `watch` after each pass of all attempts."""

    watch: Callable[[Pass, Model, PassContext], object]

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        self.watch(step, model, ctx)
