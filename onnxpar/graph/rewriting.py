"""Runs rewrites of a model one after the other: times each, shows its result, checks names of
tensors, and names the rewrite that failed in an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.errors import OnnxparError, PassError
from onnxpar.base.pass_times import PassTimes
from onnxpar.graph.used_names import check_names

Show = Callable[[str, onnx.ModelProto | gs.Graph], None]
"""Called after each rewrite, also after one that failed, with its name and the model or graph as it
left them."""


def unseen(name: str, graph: onnx.ModelProto | gs.Graph) -> None:
    """A `Show` that shows nothing."""


class Rewritten(Protocol):
    """A model while rewrites change it; `content` is the proto or graph to change."""

    path: Path

    @property
    def content(self) -> onnx.ModelProto | gs.Graph: ...


State = TypeVar("State", bound=Rewritten)


@dataclass(frozen=True)
class Rewrite(Generic[State]):
    """A step that changes or checks a model; it runs only where `when` returns True."""

    name: str
    run: Callable[[State], object]
    when: Callable[[State], bool] = lambda state: True


def run_rewrites(
    rewrites: Sequence[Rewrite[State]],
    state: State,
    who: str,
    show: Show = unseen,
    times: PassTimes | None = None,
) -> None:
    """Runs the rewrites whose `when` is true for the model, in order.

    state  the model
    who    the owner of the rewrites in errors, such as "the loader"
    show   called after each rewrite
    times  collects the wall time of each rewrite

    Errors: OnnxparError of a rewrite; PassError for any other failure, naming the rewrite.
    """
    times = times or PassTimes()
    for rewrite in (each for each in rewrites if each.when(state)):
        try:
            with times.of(rewrite.name):
                rewrite.run(state)
                if isinstance(state.content, gs.Graph):
                    check_names(state.content, who)
        except Exception as error:
            with suppress(Exception):  # what it left, if that can be shown
                show(rewrite.name, state.content)
            if isinstance(error, OnnxparError):
                raise
            text = f"the rewrite {rewrite.name} of {who} failed: {type(error).__name__}: {error}"
            raise PassError(f"{state.path}: {text}") from error
        show(rewrite.name, state.content)
