"""Runs a sharded model for the command `run`.

This module does not import the compiler: the import would take longer than a run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.bundle_names import PLAN
from onnxpar.base.errors import InputError
from onnxpar.cli.compare_prediction import compare_prediction
from onnxpar.runtime.launch.launch import Launched
from onnxpar.runtime.ranks.redirect import redirect_output
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.checks import check_timeout
from onnxpar.runtime.session.feeds import make_feeds, read_feeds, write_arrays
from onnxpar.runtime.session.session import InferenceSession
from onnxpar.runtime.session.values import arrays_in


def run_model(args: argparse.Namespace, rank: Launched | None) -> int:
    """Runs a sharded model for parsed arguments of `run`, and prints results and times; returns the
    exit status. `rank` says which rank this process is under a launcher; None: this process starts
    the ranks."""
    log_dir = args.log_dir
    if rank is not None:
        redirect_output(log_dir or "log", rank, stdout=rank.rank != 0)
        log_dir = None
    if args.repeat < 1:
        raise InputError(f"--repeat {args.repeat}: must be at least 1")
    warm_up = min(1, args.repeat - 1) if args.warmup is None else args.warmup
    if not 0 <= warm_up < args.repeat:
        raise InputError(
            f"--warmup {warm_up}: must be from 0 to {args.repeat - 1}, below the number of runs "
            f"(--repeat {args.repeat})"
        )
    check_timeout(args.timeout)
    # A rank may have to fetch the folder, and only a session fetches it.
    is_here = rank is None or (Path(args.par) / PLAN).is_file()
    bundle = Bundle.load(args.par) if is_here else None
    feeds = _feeds(args, bundle) if bundle is not None else None
    if args.profile:
        from onnxpar.runtime.profile.trace import check_place

        check_place(args.profile)
    with InferenceSession(
        args.par,
        timeout=args.timeout,
        log_dir=log_dir,
        profile=bool(args.profile),
        verify=args.verify,
        threads=args.threads,
        bind=args.bind,
        ranks_per_numa=args.ranks_per_numa,
    ) as session:
        bundle = bundle or Bundle.load(args.par)
        if feeds is None:
            feeds = _feeds(args, bundle)
        names = [p.name for p in session.get_outputs() if p.name not in session.apart]
        seconds = []
        for _ in _runs(args.repeat):
            start = time.perf_counter()
            results = session.run(None, feeds)
            seconds.append(time.perf_counter() - start)
        trace = session.end_profile(args.profile, warm_up=warm_up) if args.profile else None
    if rank is not None and rank.rank:
        return 0
    arrays = {
        key: array
        for name, result in zip(names, results, strict=True)
        for key, array in arrays_in(name, result).items()
    }
    if args.outputs:
        write_arrays(args.outputs, arrays)
    times = _times(seconds[warm_up:])
    predicted = _predicted(args, bundle)
    if args.json:
        outputs = [
            {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}
            for name, array in arrays.items()
        ]
        runs = {"count": args.repeat, "warm_up": warm_up, "seconds": times}
        runs |= {"predicted": predicted and predicted["total"]}
        print(json.dumps({"outputs": outputs, "runs": runs}, indent=2))
        return 0
    for name, array in arrays.items():
        print(f"{name}: {array.dtype} {'x'.join(map(str, array.shape)) or 'scalar'}")
    if args.repeat > 1:
        said = ", ".join(f"{name} {value * 1e3:.3f}" for name, value in times.items())
        after = f" after {warm_up} warm-up run{'s' * (warm_up > 1)}" if warm_up else ""
        print(f"{args.repeat - warm_up} runs{after}, in milliseconds: {said}")
        if predicted and predicted["total"]:
            print(compare_prediction(predicted, times["median"], "run", trace))
    if trace is not None:
        from onnxpar.report.trace_lines import trace_lines  # its tables need the compiler

        print("\n" + "\n".join(trace_lines(trace)))
        print(f"the trace is in {args.profile}, for https://ui.perfetto.dev or chrome://tracing")
    return 0


def _feeds(args: argparse.Namespace, bundle: Bundle) -> dict[str, Any]:
    """Returns the inputs of the user's file, or with --random, random ones at the plan's typical
    sizes."""
    if not args.random:
        return read_feeds(args.inputs, bundle.input_specs)
    typical = bundle.data.get("typical")
    sizes = typical[0]["sizes"] if typical else {}
    specs: Any = [
        (name, kind, bundle.inputs[name].shape_at(sizes)) for name, kind, _ in bundle.input_specs
    ]
    names = {name for name, _, _ in specs}
    ranges = {name: (a, b) for name, (a, b) in bundle.data["ranges"].items() if name in names}
    return make_feeds(specs, ranges, args.seed)


def _predicted(args: argparse.Namespace, bundle: Bundle) -> dict[str, float] | None:
    """Returns the predicted seconds of a run by part, as in plan.json; None if the plan predicts
    for other sizes than the user's inputs have."""
    if bundle.data.get("typical") and not args.random:
        return None
    predicted: dict[str, float] | None = bundle.data.get("predicted")
    return predicted


def _times(seconds: Sequence[float]) -> dict[str, float]:
    """Returns statistics of these seconds by name: min, mean, median, p90, p95, p99, max."""
    statistics = {
        "min": min(seconds),
        "mean": float(np.mean(seconds)),
        "median": float(np.median(seconds)),
    }
    statistics |= {f"p{n}": float(np.percentile(seconds, n)) for n in (90, 95, 99)}
    return statistics | {"max": max(seconds)}


def _runs(count: int) -> Iterable[int]:
    """Returns range(count), with a progress bar on a terminal."""
    if count == 1 or not sys.stderr.isatty():
        return range(count)
    from tqdm import tqdm

    shown: Iterable[int] = tqdm(range(count), "runs")
    return shown
