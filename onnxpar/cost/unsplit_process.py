"""A process that times runs of an unsplit model, with all cores of the host and with the cores of
one rank."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar.base.custom_ops import quiet_options, use_libraries
from onnxpar.runtime.ranks.cores import Share
from onnxpar.runtime.session.feeds import make_feeds
from onnxpar.runtime.session.options import SLOW_FUSIONS, SessionSpec
from onnxpar.runtime.session.ort_session import load_ort_session
from onnxpar.runtime.session.values import is_value

SECONDS = 0.05
"""Least duration in seconds of all runs of one kind."""
LONGEST = 0.5
"""A run that takes more seconds is not repeated."""
FEWEST = 3
"""Fewest runs of one kind; the first one does not count."""
_Run = Callable[[], object]


def main() -> None:
    """Reads a JSON object with the model and its inputs from standard input; writes `{"alone":
    seconds, "beside": seconds}` to standard output (see `UnsplitRuns`). Errors: those of
    onnxruntime."""
    message = json.load(sys.stdin)
    use_libraries(message["libraries"])
    ranges = {name: (low, high) for name, (low, high) in message["ranges"].items()}
    inputs = [(name, dtype, tuple(shape)) for name, dtype, shape in message["inputs"]]
    feeds = make_feeds(inputs, ranges)
    feeds |= {name: np.zeros_like(feeds[name]) for name in message["zeros"]}
    model = message["model"]
    session = load_ort_session(model, quiet_options(), providers=["CPUExecutionProvider"])
    feeds = {port.name: feeds[port.name] for port in session.get_inputs()}
    alone = _shortest([lambda: lambda: session.run(None, feeds)])
    sizes = _sizes(session, feeds)
    shares = [Share(**{**share, "cores": tuple(share["cores"])}) for share in message["shares"]]
    beside = _shortest([partial(_as_rank, model, feeds, sizes, share) for share in shares])
    print(json.dumps({"alone": alone, "beside": beside}))


def _sizes(session: ort.InferenceSession, feeds: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of the symbols in the shapes of inputs, for these feeds."""
    fed = [(port.shape, np.shape(feeds[port.name])) for port in session.get_inputs()]
    pairs = [pair for shape, sizes in fed for pair in zip(shape, sizes, strict=True)]
    return {symbol: size for symbol, size in pairs if isinstance(symbol, str)}


def _as_rank(model: str, feeds: Mapping[str, Any], sizes: Mapping[str, int], share: Share) -> _Run:
    """Returns a function that runs the model as a rank process would: on a rank's share of the
    cores, and with open sizes fixed, so that no nodes compute sizes. If all inputs and outputs are
    tensors of numbers, they are bound to memory."""
    if share.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.cores)  # of this thread, and of threads that it starts
    options = quiet_options()
    SessionSpec().apply(options, 0, share.threads, share.spin)
    for symbol, size in sizes.items():
        options.add_free_dimension_override_by_name(symbol, size)
    session = load_ort_session(model, options, SLOW_FUSIONS, providers=["CPUExecutionProvider"])
    if any(is_value(port.type) for port in (*session.get_inputs(), *session.get_outputs())):
        return lambda: session.run(None, feeds)
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    for port in session.get_outputs():
        binding.bind_output(port.name)
    return lambda: session.run_with_iobinding(binding)


def _shortest(openers: Sequence[Callable[[], _Run]]) -> float:
    """Runs each opener in a thread of its own, all at once: it opens a session and returns its run,
    which is then repeated. Returns the seconds of the shortest run, of the slowest thread."""
    are_open = Barrier(len(openers))

    def runs(opened: Callable[[], _Run]) -> float:
        try:
            run = opened()
        except BaseException:
            are_open.abort()
            raise
        are_open.wait()
        times: list[float] = []
        end = time.perf_counter() + SECONDS
        while len(times) < FEWEST or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
            if times[-1] > LONGEST:
                break
        return min(times[1:] or times)

    with ThreadPoolExecutor(len(openers)) as pool:
        return max(pool.map(runs, openers))
