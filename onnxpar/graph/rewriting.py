"""Runs rewrites one after the other; records the time of each, shows its result, checks names, and
says in an error which rewrite failed."""

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
"""Called after each rewrite, also after one that failed, with its name and what it leaves."""


def unseen(name: str, graph: onnx.ModelProto | gs.Graph) -> None:
    """A `Show` that does nothing."""


class Rewritten(Protocol):
    """A model while rewrites change it; `content` is the proto or graph that they change."""

    path: Path

    @property
    def content(self) -> onnx.ModelProto | gs.Graph: ...


State = TypeVar("State", bound=Rewritten)


@dataclass(frozen=True)
class Rewrite(Generic[State]):
    """A step that changes a model, or checks it; `when` says whether it runs for a model."""

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
    """Runs the rewrites whose `when` is true, in order.

    who    the owner of the rewrites in errors, such as "the loader"
    show   called after each
    times  collects the wall time of each

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
