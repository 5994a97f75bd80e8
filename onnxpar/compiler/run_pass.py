"""Runs one pass; errors name the pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import onnx_graphsurgeon as gs

from onnxpar.base.errors import OnnxparError, PassError
from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.graph.used_names import check_names


def run_pass(step: Pass, graph: gs.Graph, ctx: PassContext) -> bool:
    """Runs one pass, and records the facts that it ensures; returns True if it changed anything."""
    changed = step.run(graph, ctx)
    check_names(graph, f"pass {step.name}")
    ctx.facts.update(step.ensures)
    return changed


def run_again(passes: Sequence[Pass], graph: gs.Graph, ctx: PassContext, at: str) -> None:
    """Runs passes on the graph at other sizes (named `at` in errors). Layouts are not verified
    there: rules may see other factors in dimensions that stay whole. Errors: OnnxparError of a
    pass; PassError for any other failure."""
    ran: list[str] = []
    for step in passes:
        with failures(step, ran, at):
            run_pass(step, graph, ctx)
        ran.append(step.name)


@contextmanager
def failures(step: Pass, ran: Sequence[str], at: str = "") -> Iterator[None]:
    """A block in which any exception but an OnnxparError becomes a PassError that names the pass,
    the sizes (`at`) and the passes that `ran` before it."""
    try:
        yield
    except OnnxparError:
        raise
    except Exception as error:
        before = f" after {', '.join(ran)}" if ran else ""
        sizes = f" at {at}" if at else ""
        raise PassError(
            f"pass {step.name} failed{sizes}{before}: {type(error).__name__}: {error}"
        ) from error
