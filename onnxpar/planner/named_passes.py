"""The command `opt`: runs passes that a user names on a model or a dump, and shows the graph
between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from onnxpar.base.errors import StrategyError
from onnxpar.base.pass_times import LOAD, OTHER, WRITE_GRAPH
from onnxpar.compiler.graph_text import graph_text
from onnxpar.compiler.pass_ import Pass, PassContext, Stage
from onnxpar.load.load import Model
from onnxpar.passes.rewrite.differentiate import Differentiate
from onnxpar.planner.context import load_model, prepare
from onnxpar.planner.dump import Dump, is_dump, read_dump, write_graph
from onnxpar.planner.observer import Observer, Observers
from onnxpar.planner.options import Options
from onnxpar.planner.pass_registry import parse_passes
from onnxpar.planner.run_passes import run_passes
from onnxpar.planner.unused_options import refuse_for_dump, refuse_without_plan


def run_named(
    path: Path,
    options: Options,
    passes: str,
    print_after: Sequence[str],
    dump: str | os.PathLike[str] | None,
    output: str | os.PathLike[str] | None,
    show: Callable[[str], object],
) -> None:
    """Runs the named passes on a model or a dump.

    passes       as `parse_passes` reads them: "propagate-layouts,insert-collectives"
    print_after  names of passes after which to show the graph, or "all"; empty: after the last one
    dump         folder that gets the graph after every pass
    output       file that gets the graph after the last pass
    show         gets the text of the graph

    Errors: OnnxparError.
    """
    with options.times.of(OTHER):
        _run_named(path, options, passes, print_after, dump, output, show)


class _Printer(Observer):
    """Shows the text of the graph after the passes with these names; after every pass if "all" is
    among them."""

    def __init__(self, names: Sequence[str], show: Callable[[str], object]) -> None:
        self.names, self.show = names, show

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        if "all" in self.names or step.name in self.names:
            self.show(f"// after {step.name}\n{graph_text(model.graph, ctx)}\n")


def _run_named(
    path: Path,
    options: Options,
    passes: str,
    print_after: Sequence[str],
    dump: str | os.PathLike[str] | None,
    output: str | os.PathLike[str] | None,
    show: Callable[[str], object],
) -> None:
    """`run_named` without the timing; takes its parameters."""
    times = options.times
    dumped = None
    if is_dump(path):
        with times.of(LOAD):
            dumped = read_dump(path)
        refuse_for_dump(options, path, dumped[1].sharding.mesh)
    else:
        refuse_without_plan(options)
    steps = parse_passes(passes, sorted(dumped[1].facts) if dumped is not None else ())
    known = {p.name for p in steps}
    for name in print_after:
        if name != "all" and name not in known:
            raise StrategyError(
                f"--print-after {name}: that pass does not run; give one of {', '.join(known)}"
            )
    observers: list[Observer] = [_Printer(print_after, show)]
    if dump is not None:
        observers.append(Dump(dump))
    observer = Observers(observers)
    if dumped is not None:
        model, ctx = dumped
    else:
        for_training = any(isinstance(p, Differentiate) for p in steps)
        model = load_model(path, options, for_training, show=observer.loading)
        ctx = prepare(model, options, steps, observer)
        steps = [p for p in steps if p.stage is not Stage.REWRITE]
    run_passes(model, ctx, steps, observer, check=True, times=times)
    if output is not None:
        with times.of(WRITE_GRAPH):
            write_graph(model, ctx, Path(output))
    elif not print_after and dump is None:
        show(graph_text(model.graph, ctx))
