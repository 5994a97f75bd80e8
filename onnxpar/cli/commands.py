"""The commands of the command line, except for training. Each takes the parsed arguments and
returns the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from tqdm import tqdm

from onnxpar.api import (
    Prover,
    compare_strategies,
    compare_with_trace,
    observers,
    output_of,
    saver_of,
    timed,
)
from onnxpar.api import inspect as saved_plan
from onnxpar.api import ops as ops_like
from onnxpar.api import verify as proof_of
from onnxpar.base.errors import InputError, StrategyError, UnprovedError
from onnxpar.base.json_text import json_text
from onnxpar.base.progress_line import progress_line
from onnxpar.cli.colours import coloured
from onnxpar.cli.options import values_of, with_times
from onnxpar.cli.training_commands import warn_of
from onnxpar.compiler.plan import Plan, SavedPlan
from onnxpar.equivalence.verification import Verification
from onnxpar.planner import sharder
from onnxpar.planner.convert_options import options_of
from onnxpar.planner.named_passes import run_named
from onnxpar.planner.option_table import Kind, LayoutOptions, PlanOptions
from onnxpar.planner.options import Options
from onnxpar.planner.paging import paged_by_default
from onnxpar.planner.pass_registry import LIST, pass_lines
from onnxpar.report import op_table
from onnxpar.report.check import Check, Way, check_model
from onnxpar.report.compare_strategies import Candidates
from onnxpar.report.comparison_result import Comparison
from onnxpar.report.digest_lines import sum_lines, verified_text
from onnxpar.report.node_data import write_node_data
from onnxpar.report.plan_text import plan_lines
from onnxpar.report.report_page import write_page
from onnxpar.report.strategy_costs import StrategyCosts, strategy_costs
from onnxpar.report.walk import walk
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.bundle_files import ranks_text


@with_times
def shard(args: argparse.Namespace) -> int:
    """Runs `shard`: writes a sharded model and prints its plan; returns 1 if a proof that is asked
    for fails."""
    output = output_of(args.given_model) if args.output is None else args.output
    options = _plan_options(args)
    saver = saver_of(args.save_strategy, options)
    observer = observers([saver], args.dump)
    shorter = [Path(file) for file in args.shorter]
    prove = Prover(args.model, Path(output), shorter) if args.verify else None
    try:
        with _progress("weights", _weight_bytes(args.model)) as progress:
            result = sharder.shard(
                args.model, output, options, progress, observer, args.ranks, shorter, prove
            )
    except UnprovedError as error:
        print(error)
        return 1
    saved = saver.write()
    _print_plan(result, full=False)
    if prove is not None:
        print(prove.result)
    print(f"written to {output}")
    if args.ranks is not None:
        print(_ranks_line(output, args.ranks, result.mesh.size))
    if saved:
        print(saved)
    return 0


def _ranks_line(output: str | Path, ranks: Sequence[int], size: int) -> str:
    """Returns the line for `shard --ranks`, where each host writes only its own ranks: which ranks
    the folder has, and the digest of the plan, which must be equal on all hosts."""
    return (
        f"{ranks_text(sorted({*ranks}))} of {size}; the SHA-256 of the plan begins with "
        f"{Bundle.load(output).digest[:8]}, and must on each host"
    )


@with_times
def plan(args: argparse.Namespace) -> int:
    """Runs `plan`: prints the plan that `shard` would follow; with --compare, a comparison with a
    trace; with --costs, the costs of nodes; with --candidates, all strategies."""
    _check_one_result(args)
    options = _plan_options(args)
    if args.costs:
        return _print(strategy_costs(args.model, args.costs, options), args.json)
    if args.compare:
        return _print(compare_with_trace(args.model, options, args.compare), args.json)
    if args.candidates or args.html or args.node_data:
        return _explain(args, replace(options, check_layouts=False))
    saver = saver_of(args.save_strategy, options)
    result, _ = sharder.plan(args.model, options, observers([saver], args.dump))
    saved = saver.write()
    if args.json:
        print(result.text())
        return 0
    _print_plan(result)
    if saved:
        print(f"\n{saved}")
    return 0


def _check_one_result(args: argparse.Namespace) -> None:
    """Raises StrategyError if the options of `plan` ask for several results that do not go
    together."""
    results = [("--costs", args.costs), ("--compare", args.compare)]
    results += [("--candidates", args.candidates), ("--html", args.html)]
    results += [("--node-data", args.node_data)]
    requested = [flag for flag, value in results if value]
    for flag, value in (("--save-strategy", args.save_strategy), ("--dump", args.dump)):
        if value and requested:
            raise StrategyError(f"{flag} does not go with {requested[0]}; leave one of them out")
    if len(requested) > 1 and requested not in (
        ["--candidates", "--html"],
        ["--html", "--node-data"],
    ):
        raise StrategyError(
            f"{requested[0]} does not go with {requested[1]}; leave one of them out"
        )


def _explain(args: argparse.Namespace, options: Options) -> int:
    """Runs `plan --candidates`, `plan --html` and `plan --node-data`: prints the predicted time of
    each strategy, or the plan, and writes an HTML page or data for Model Explorer."""
    if args.candidates:
        _print(compare_strategies(args.model, options, args.html), args.json)
    else:
        explained, seen = walk(args.model, options)
        if args.html:
            write_page(args.html, explained, None, seen)
        if args.node_data:
            write_node_data(args.node_data, explained, seen)
        if args.json:
            print(explained.plan.text())
        else:
            _print_plan(explained.plan, full=False)
    for place in filter(None, (args.html, args.node_data)):
        if not args.json:
            print(f"written to {place}")
    return 0


def _print(
    result: Candidates | Check | Comparison | SavedPlan | StrategyCosts | Verification,
    as_json: bool,
) -> int:
    print(json_text(result.to_json(), 1) if as_json else coloured(str(result), sys.stdout))
    return 0


def annotate(args: argparse.Namespace) -> int:
    """Runs `annotate`: writes the model with the plan as annotations."""
    result = sharder.annotate(args.model, args.output, _options(args, LayoutOptions))
    _print_plan(result, full=False)
    print(f"written to {args.output}")
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Runs `inspect`: prints the plan of a sharded model, or the SHA-256 of each of its files."""
    if args.sha256sums:
        print("\n".join(sum_lines(args.par)))
        return 0
    _print(saved_plan(args.par, verify=args.verify), args.json)
    if args.verify and not args.json:
        print(f"\n{verified_text(args.par)}")
    return 0


def check(args: argparse.Namespace) -> int:
    """Runs `check`: shards a model, runs it, and compares its outputs with those of the unsplit
    model; returns 1 on a mismatch."""
    way = Way(**{field.name: getattr(args, field.name) for field in fields(Way)})
    with _progress("weights", _weight_bytes(args.model)) as progress:
        result = check_model(args.model, _options(args), way, progress, progress_line("check"))
    _print(result, args.json)
    if way.train and result.plan.step is not None:
        warn_of(result.plan.step)
    return 0 if result.ok else 1


def verify(args: argparse.Namespace) -> int:
    """Runs `verify`: proves that the ranks of a sharded model compute it; returns 1 if they are not
    shown to."""
    dims = dict(map(_named_size, args.dims))
    how = {"least": args.least, "weights": args.weights, "seed": args.seed, "keep": args.keep}
    result = proof_of(args.model, args.par, dims=dims, shorter=args.shorter, **how)
    _print(result, args.json)
    return 0 if result.ok else 1


def _named_size(text: str) -> tuple[str, int]:
    """Returns the name and the value of `NAME=SIZE`. Errors: InputError."""
    name, _, size = text.partition("=")
    if not name or not size.isdigit():
        raise InputError(f"--dim {text}: give NAME=SIZE, with a whole number")
    return name, int(size)


@with_times
def opt(args: argparse.Namespace) -> int:
    """Runs `opt`: runs the named passes on a model or a dump, and prints the graph after the last
    pass, or after each pass of --print-after."""
    options = _options(args, LayoutOptions)
    if args.passes == LIST:
        print("\n".join(pass_lines()))
        return 0
    if args.model is None:
        raise InputError("opt: no model is given; give model.onnx, or a file that --dump wrote")
    show = partial(print, end="")
    run_named(args.model, options, args.passes, args.print_after, args.dump, args.output, show)
    if args.output:
        print(f"written to {args.output}")
    return 0


def ops(args: argparse.Namespace) -> int:
    """Runs `ops`: prints the table of ops, with their sharding rules and proofs."""
    table = ops_like(args.pattern, plugin=args.plugin)
    print(op_table.to_json(table) if args.json else "\n".join(op_table.lines(table)))
    return 0


def _options(args: argparse.Namespace, kind: Kind = PlanOptions) -> Options:
    options = options_of({**values_of(args, kind), "check_layouts": True}, kind=kind)
    return timed(options, vars(args).get("times"))


def _plan_options(args: argparse.Namespace) -> Options:
    """Returns the options of `shard` and `plan`; for a folder of a language model, with a paged
    cache unless the user chose otherwise."""
    return paged_by_default(args.given_model, _options(args))


def _print_plan(plan: Plan, full: bool = True) -> None:
    print(coloured("\n".join(plan_lines(plan.to_json(), full)), sys.stdout))


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def _weight_bytes(model: Path) -> int:
    """Returns the bytes of the model's weights, as the total of the progress bar; 0 if no bar is
    shown."""
    if not _is_terminal():
        return 0
    try:
        proto = onnx.load(str(model), load_external_data=False)
    except Exception:  # the command itself reports the error
        return 0
    return sum(
        int(np.prod(t.dims, dtype=np.int64))
        * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize
        for t in proto.graph.initializer
    )


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A block with a progress bar of `total` bytes, on a terminal only; yields the function that
    advances the bar by a number of bytes."""
    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, disable=not _is_terminal(), leave=False
    ) as bar:
        yield bar.update
