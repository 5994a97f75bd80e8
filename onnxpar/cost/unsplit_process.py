"""The process that times runs of an unsplit model, with all cores and with the cores of ranks."""

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
"""Least duration of the runs of each kind."""
LONGEST = 0.5
"""Longest run, in seconds, that is repeated."""
FEWEST = 3
"""Fewest runs of each kind; the first run does not count."""
_Run = Callable[[], object]


def main() -> None:
    """Reads the model and its inputs from standard input; writes the seconds of runs to standard
    output. Errors: those of onnxruntime."""
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
    """The sizes that these feeds give to the symbols in the shapes of inputs."""
    fed = [(port.shape, np.shape(feeds[port.name])) for port in session.get_inputs()]
    pairs = [pair for shape, sizes in fed for pair in zip(shape, sizes, strict=True)]
    return {symbol: size for symbol, size in pairs if isinstance(symbol, str)}


def _as_rank(model: str, feeds: Mapping[str, Any], sizes: Mapping[str, int], share: Share) -> _Run:
    """A run as in the process of a rank: on the rank's share of the cores, without the nodes that
    compute sizes. If all inputs and outputs are tensors of numbers, they are bound to memory."""
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
    """The seconds of the shortest run of each opener, while all run; returns the longest of these.
    Each opener runs in a thread, which opens a session and then repeats its run."""
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
