"""Runs one pass; errors name the pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import onnx_graphsurgeon as gs

from onnxpar.base.errors import OnnxparError, PassError
from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.graph.used_names import check_names


def run_pass(step: Pass, graph: gs.Graph, ctx: PassContext) -> bool:
    """Runs a pass, and records the facts that it ensures; returns True if anything changed."""
    changed = step.run(graph, ctx)
    check_names(graph, f"pass {step.name}")
    ctx.facts.update(step.ensures)
    return changed


def run_again(passes: Sequence[Pass], graph: gs.Graph, ctx: PassContext, at: str) -> None:
    """Runs passes on the graph at other sizes, which `at` names in errors. Does not verify the
    results: at other sizes, rules may see other factors of dimensions that stay whole. Errors:
    OnnxparError of a pass; PassError for any other failure."""
    ran: list[str] = []
    for step in passes:
        with failures(step, ran, at):
            run_pass(step, graph, ctx)
        ran.append(step.name)


@contextmanager
def failures(step: Pass, ran: Sequence[str], at: str = "") -> Iterator[None]:
    """Turns an exception other than an OnnxparError into a PassError that names the pass, the sizes
    and the passes before."""
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
