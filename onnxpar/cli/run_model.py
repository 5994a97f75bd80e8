"""Runs a sharded model for the command `run`. It does not import the compiler, which would take
longer than a run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from onnxpar.errors import InputError
from onnxpar.files.bundle_names import PLAN
from onnxpar.runtime.bundle import Bundle
from onnxpar.runtime.checks import check_timeout
from onnxpar.runtime.feeds import read_feeds, write_arrays
from onnxpar.runtime.launch import Launched
from onnxpar.runtime.redirect import redirect_output
from onnxpar.runtime.session import InferenceSession
from onnxpar.runtime.values import arrays_in


def run_model(args: argparse.Namespace, rank: Launched | None) -> int:
    """Runs a model.par, under a launcher as one of its ranks."""
    log_dir = args.log_dir
    if rank is not None:
        redirect_output(log_dir or "log", rank, stdout=rank.rank != 0)
        log_dir = None
    if args.repeat < 1:
        raise InputError(f"--repeat {args.repeat}: must be at least 1")
    check_timeout(args.timeout)
    # A rank may have to fetch the folder, and only a session does so.
    is_here = rank is None or (Path(args.par) / PLAN).is_file()
    feeds = read_feeds(args.inputs, Bundle.load(args.par).input_specs) if is_here else None
    if args.profile:
        from onnxpar.runtime.trace import check_place

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
        if feeds is None:
            feeds = read_feeds(args.inputs, Bundle.load(args.par).input_specs)
        names = [port.name for port in session.get_outputs()]
        seconds = []
        for _ in _runs(args.repeat):
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
        from onnxpar.report.trace_lines import trace_lines  # its tables need the compiler

        print("\n" + "\n".join(trace_lines(trace)))
        print(f"the trace is in {args.profile}, for https://ui.perfetto.dev or chrome://tracing")
    return 0


def _runs(count: int) -> Iterable[int]:
    """Returns the numbers of the runs, and shows how many are over if a terminal is there."""
    if count == 1 or not sys.stderr.isatty():
        return range(count)
    from tqdm import tqdm

    shown: Iterable[int] = tqdm(range(count), "runs")
    return shown
