"""What the commands of the command line do."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tqdm import tqdm

from onnxpar import op_table, pipeline
from onnxpar.arguments import dims_of, states_of
from onnxpar.candidate_lines import candidate_lines
from onnxpar.candidates import Candidates, choices, fastest_first, try_candidate
from onnxpar.comparison_lines import comparison_lines
from onnxpar.dump import Dump, facts, is_dump, read_dump, write_graph
from onnxpar.errors import InputError, StrategyError
from onnxpar.explain import explain
from onnxpar.manual import MANUAL
from onnxpar.model import Model
from onnxpar.pass_list import LIST, parse_passes, parse_placed, pass_lines
from onnxpar.passes.differentiate import Differentiate
from onnxpar.passes.fuse_all_reduces import FuseAllReduces
from onnxpar.passes.pass_ import Pass, PassContext, Stage
from onnxpar.pipeline import Options
from onnxpar.plan import Plan
from onnxpar.plugins import load_plugin
from onnxpar.report import plan_lines
from onnxpar.report_page import write_page
from onnxpar.runtime.bundle import Bundle
from onnxpar.runtime.compare import Closeness, compare
from onnxpar.runtime.feeds import make_feeds, read_feeds, read_given, write_arrays
from onnxpar.runtime.launch import launched_rank, redirect_output
from onnxpar.runtime.replicas import compare_replicas
from onnxpar.runtime.session import InferenceSession
from onnxpar.runtime.values import arrays_in
from onnxpar.search.aim import Aim
from onnxpar.search.compare_trace import PlannedNode, compare_trace, planned_nodes
from onnxpar.search.save import Saver
from onnxpar.strategy import Strategy
from onnxpar.text import graph_text
from onnxpar.topology import Topology
from onnxpar.trace import check_place, read_trace
from onnxpar.trace_lines import trace_lines
from onnxpar.training.compare import compare_training, judge_compressed, judge_gradients
from onnxpar.training.data import Data
from onnxpar.training.replicas import compare_copies
from onnxpar.training.trainer import Trainer

NOTHING = "no output is held by several ranks, so there is nothing to compare"


def shard(args: argparse.Namespace) -> int:
    """Writes a model.par."""
    with _progress("weights", _weight_bytes(args.model)) as progress:
        saver = _saver(args)
        watch = _watch(args, saver)
        made = pipeline.shard(args.model, args.output, _options(args), progress, watch)
    saved = saver.write()
    _print_plan(made, full=False)
    print(f"written to {args.output}")
    if saved:
        print(saved)
    return 0


def plan(args: argparse.Namespace) -> int:
    """Prints what shard would do."""
    if (args.save_strategy or args.dump) and (args.compare or args.candidates or args.html):
        flag = "--save-strategy" if args.save_strategy else "--dump"
        raise StrategyError(f"{flag}: leave out --compare, --candidates and --html")
    if args.compare and (args.candidates or args.html):
        raise StrategyError("--compare is of one plan that ran; leave out --candidates and --html")
    if args.compare:
        return _compare_trace(args)
    if args.candidates or args.html:
        return _explain(args)
    saver = _saver(args)
    made, _ = pipeline.plan(args.model, _options(args), _watch(args, saver))
    saved = saver.write()
    if args.json:
        print(made.text())
        return 0
    _print_plan(made)
    if saved:
        print(f"\n{saved}")
    return 0


def _saver(args: argparse.Namespace) -> Saver:
    if args.save_strategy and args.preset == MANUAL:
        raise StrategyError("--save-strategy: a manual program has its layouts in itself")
    return Saver(args.save_strategy)


def _watch(args: argparse.Namespace, saver: Saver) -> pipeline.Watch:
    """What is called after each pass: it saves the strategy, and dumps the graph."""
    if not args.dump:
        return saver.watch
    dump = Dump(args.dump)

    def watch(step: Pass, model: Model, ctx: PassContext) -> None:
        dump.watch(step, model, ctx)
        saver.watch(step, model, ctx)

    return watch


def _explain(args: argparse.Namespace) -> int:
    """Prints what each strategy that applies would take, and writes the page of one."""
    options = replace(_options(args), verify=False)
    tried = _candidates(args, options) if args.candidates else None
    if args.html:
        is_open = tried is not None and options.preset is None and options.search is None
        chosen = tried.winner.chosen(options) if tried is not None and is_open else options
        explained = explain(args.model, chosen)
        write_page(args.html, explained, tried)
    if args.json:
        print(json.dumps(tried.to_json(), indent=1) if tried is not None else explained.plan.text())
        return 0
    if tried is not None:
        print("\n".join(candidate_lines(tried)))
    else:
        _print_plan(explained.plan, full=False)
    if args.html:
        print(f"written to {args.html}")
    return 0


def _candidates(args: argparse.Namespace, options: Options) -> Candidates:
    """The strategies that are tried; of one that is asked for, a page may show more."""
    given = replace(options, preset=None, search=None) if args.html else options
    tries = tqdm(choices(args.model, given), "strategies", disable=not _is_terminal())
    tried = [try_candidate(args.model, each) for each in tries]
    return fastest_first(args.model.name, args.objective, tried)


def _compare_trace(args: argparse.Namespace) -> int:
    """Prints what the plan predicts beside what a trace of it has."""
    trace = read_trace(args.compare)
    options = _options(args)
    if options.preset == MANUAL:
        raise StrategyError(
            "--compare: of a manual program nothing is predicted; use `run --profile`"
        )
    nodes: dict[str, PlannedNode] = {}

    def watch(step: Pass, model: Model, ctx: PassContext) -> None:
        if isinstance(step, FuseAllReduces):
            apart = model.step.evaluation if model.step is not None else ()
            nodes.update(planned_nodes(model.graph, ctx.sharding, apart))

    made, _ = pipeline.plan(args.model, options, watch)
    found = compare_trace(trace, made, nodes)
    if args.json:
        print(json.dumps(found.to_json(), indent=1))
        return 0
    print("\n".join(comparison_lines(found)))
    if made.example:
        sizes = ", ".join(f"{name}={size}" for name, size in made.example.items())
        print(f"\nsizes are open; predictions are for {sizes}, whatever was run")
    return 0


def annotate(args: argparse.Namespace) -> int:
    """Writes the model with the plan in it."""
    made = pipeline.annotate(args.model, args.output, _options(args))
    _print_plan(made, full=False)
    print(f"written to {args.output}")
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Prints the plan of a model.par."""
    Bundle.load(args.par)
    data = json.loads((Path(args.par) / "plan.json").read_text(encoding="utf-8"))
    print(json.dumps(data, indent=1) if args.json else "\n".join(plan_lines(data)))
    return 0


def run(args: argparse.Namespace) -> int:
    """Runs a model.par; under mpirun as one of its ranks."""
    rank = launched_rank()
    if rank is not None:
        redirect_output(args.log_dir or "log", rank.rank)
    if args.repeat < 1:
        raise InputError(f"--repeat {args.repeat}: at least 1")
    feeds = read_feeds(args.inputs, _input_specs(args.par))
    if args.profile:
        check_place(args.profile)
    with _session(args.par, args, profile=bool(args.profile)) as session:
        names = [port.name for port in session.get_outputs()]
        seconds = []
        for _ in tqdm(range(args.repeat), "runs", disable=not _is_terminal() or args.repeat == 1):
            start = time.perf_counter()
            results = session.run(None, feeds)
            seconds.append(time.perf_counter() - start)
        trace = session.end_profile(args.profile, warm_up=1) if args.profile else None
    if rank is not None and rank.rank:
        return 0
    arrays = {
        key: array
        for name, result in zip(names, results, strict=True)
        for key, array in arrays_in(name, result).items()
    }
    if args.outputs:
        write_arrays(args.outputs, arrays)
    for name, array in arrays.items():
        print(f"{name}: {array.dtype} {'x'.join(map(str, array.shape)) or 'scalar'}")
    if args.repeat > 1:
        first, later = seconds[0], seconds[1:]
        print(
            f"{args.repeat} runs: first {first * 1e3:.1f} ms, then median "
            f"{np.median(later) * 1e3:.1f} ms "
            f"(min {min(later) * 1e3:.1f}, max {max(later) * 1e3:.1f})"
        )
    if trace is not None:
        print("\n" + "\n".join(trace_lines(trace)))
        print(f"the trace is in {args.profile}, for https://ui.perfetto.dev or chrome://tracing")
    return 0


def check(args: argparse.Namespace) -> int:
    """Shards, runs and compares; 1 on a mismatch."""
    close = None
    if args.rtol is not None or args.atol is not None:
        close = Closeness(args.rtol or 0.0, args.atol or 0.0)
    if args.train:
        if close is not None:
            raise InputError("--rtol, --atol: losses of --train have tolerances of their own")
        return _check_training(args)
    options = replace(_options(args), replicas=True)
    with tempfile.TemporaryDirectory(prefix="onnxpar-check-") as folder:
        par = Path(folder) / "model.par"
        with _progress("weights", _weight_bytes(args.model)) as progress:
            made = pipeline.shard(args.model, par, options, progress)
        feeds, made_up = _check_feeds(args, made, Bundle.load(par))
        with _session(par, args) as session:
            if options.preset == MANUAL:
                report = compare_replicas(session, feeds, close)
            else:
                report = compare(args.model, session, feeds, close=close, timed=True)
    if made.step is not None and close is None:
        report = judge_compressed(judge_gradients(report, made.step), made.step)
    _print_plan(made)
    print()
    if args.inputs and made_up:
        print(f"made up: {'; '.join(made_up)}")
    print(report.text() if report.rows else NOTHING)
    return 0 if report.ok else 1


def _check_training(args: argparse.Namespace) -> int:
    """The same over many steps of a training step, each of which starts from the last."""
    if args.steps < 1:
        raise InputError(f"--steps {args.steps}: at least 1")
    with tempfile.TemporaryDirectory(prefix="onnxpar-check-") as folder:
        par = Path(folder) / "step.par"
        is_manual = args.preset == MANUAL
        made = pipeline.shard(args.model, par, replace(_options(args), replicas=is_manual))
        with Trainer(par, timeout=args.timeout, log_dir=args.log_dir) as trainer:
            batches = islice(_batches(args, made, trainer), args.steps)
            if is_manual:
                report = compare_copies(trainer, batches, args.lr)
            else:
                report = compare_training(args.model, trainer, batches, args.lr)
    _print_plan(made, full=False)
    against = "against each other" if is_manual else "against one"
    print(f"{args.steps} steps over {made.mesh.size} ranks {against}:")
    print(report.text() if report.rows else NOTHING)
    return 0 if report.ok else 1


def _batches(args: argparse.Namespace, made: Plan, trainer: Trainer) -> Iterator[dict[str, Any]]:
    """What is given, again and again, or random batches."""
    data = Data.read(args.inputs, trainer.data) if args.inputs else None
    specs = [s for s in _input_specs(trainer.bundle.path) if s[0] in trainer.spec.data]
    ranges = {name: r for name, r in made.ranges.items() if name in trainer.spec.data}
    for number in count():
        if data is not None:
            yield from data.epoch(number, args.seed)
        else:
            yield make_feeds(specs, ranges, args.seed + number)


def opt(args: argparse.Namespace) -> int:
    """Runs the passes named, on a model or a dump, and prints the graph after the last, or after
    those asked for."""
    _load_plugins(args)
    if args.passes == LIST:
        print("\n".join(pass_lines()))
        return 0
    if args.model is None:
        raise InputError("opt: which model? give model.onnx, or a file that --dump has written")
    dumped = read_dump(args.model) if is_dump(args.model) else None
    passes = parse_passes(args.passes, facts(dumped[1]) if dumped is not None else ())
    known = {p.name for p in passes}
    for name in args.print_after:
        if name != "all" and name not in known:
            raise StrategyError(f"--print-after {name}: not among the passes {', '.join(known)}")
    dump = Dump(args.dump) if args.dump else None

    def watch(step: Pass, model: Model, ctx: PassContext) -> None:
        if dump is not None:
            dump.watch(step, model, ctx)
        if "all" in args.print_after or step.name in args.print_after:
            print(f"// behind {step.name}\n{graph_text(model.graph, ctx)}")

    options = _options(args)
    if dumped is not None:
        model, ctx = dumped
        if options.mesh not in (None, ctx.sharding.mesh):
            raise StrategyError(f"{args.model} is for the mesh {ctx.sharding.mesh}; omit --mesh")
    else:
        for_training = any(isinstance(p, Differentiate) for p in passes)
        model = pipeline.load_model(args.model, options, for_training)
        ctx = pipeline.prepare(model, options, passes, watch)
        passes = [p for p in passes if p.stage is not Stage.REWRITE]
    pipeline.run_passes(model, ctx, passes, watch, check=True)
    if args.output:
        write_graph(model, ctx, Path(args.output))
        print(f"written to {args.output}")
    elif not args.print_after and not args.dump:
        print(graph_text(model.graph, ctx), end="")
    return 0


def ops(args: argparse.Namespace) -> int:
    """Prints the table of ops."""
    _load_plugins(args)
    table = op_table.rows(args.pattern)
    if not table:
        raise StrategyError(f"{args.pattern!r} matches no op; `onnxpar ops` lists them")
    print(op_table.to_json(table) if args.json else "\n".join(op_table.lines(table)))
    return 0


def _load_plugins(args: argparse.Namespace) -> None:
    for module in args.plugin:
        load_plugin(module)


def _options(args: argparse.Namespace) -> Options:
    _load_plugins(args)
    return Options(
        devices=args.devices,
        mesh=args.mesh,
        preset=args.preset,
        strategy=Strategy.given(args.strategy or None),
        dims=dims_of(args.dim),
        states=states_of(args.state),
        strict=args.strict,
        verify=True,
        configuration=args.configuration,
        fusion=args.fusion,
        bucket_bytes=None if args.bucket_mb is None else int(args.bucket_mb * (1 << 20)),
        compression=args.compression,
        topology=Topology.given(args.topology),
        search=args.search,
        aim=Aim.given(args.objective, args.memory_limit, args.untied),
        passes=[parse_placed(text) for text in args.add_pass],
    )


def _session(par: Any, args: argparse.Namespace, profile: bool = False) -> InferenceSession:
    return InferenceSession(par, timeout=args.timeout, log_dir=args.log_dir, profile=profile)


def _input_specs(par: str | os.PathLike[str]) -> list[tuple[str, str, tuple[int, ...]]]:
    Bundle.load(par)
    plan = json.loads((Path(par) / "plan.json").read_text())
    return [
        (p["name"], p["dtype"] or p["type"], tuple(p["shape"] or ()))
        for p in plan["inputs"]
        if not p.get("default")
    ]


def _check_feeds(
    args: argparse.Namespace, made: Plan, bundle: Bundle
) -> tuple[dict[str, Any], list[str]]:
    """What is given, and random feeds for the rest, of which it tells name, type and shape; open
    sizes are those of what is given, else the plan's examples."""
    specs = _input_specs(bundle.path)
    feeds = read_given(args.inputs, specs) if args.inputs else {}
    shapes = {name: a.shape for name, a in feeds.items() if isinstance(a, np.ndarray)}
    known = dict(zip(bundle.symbols, bundle.sizes(shapes), strict=True))
    sizes = {s: known[s] or made.example[s] for s in bundle.symbols}
    rest: Any = [
        (name, kind, bundle.inputs[name].shape_at(sizes))
        for name, kind, _ in specs
        if name not in feeds
    ]
    unknown = {name for name, _, _ in rest}
    ranges = {name: r for name, r in made.ranges.items() if name in unknown}
    made_up = [f"{name} {kind} {list(shape)}" for name, kind, shape in rest]
    return make_feeds(rest, ranges, args.seed) | feeds, made_up


def _print_plan(made: Plan, full: bool = True) -> None:
    print("\n".join(plan_lines(made.to_json(), full)))


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def _weight_bytes(model: Path) -> int:
    """The size of the model and its external data, for the progress bar."""
    if not _is_terminal():
        return 0
    try:
        proto = onnx.load(str(model), load_external_data=False)
    except Exception:  # the command itself says what is wrong with it
        return 0
    return sum(
        int(np.prod(t.dims, dtype=np.int64))
        * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize
        for t in proto.graph.initializer
    )


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over bytes, on a terminal only."""
    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, disable=not _is_terminal(), leave=False
    ) as bar:
        yield bar.update
