"""From what was measured to a topology: least squares, and the table that shows how well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from scipy.optimize import nnls

from onnxpar.calibration.measure import LARGE, MEASURED, Measurements, Talk
from onnxpar.calibration.models import NARROW, PICKED, PIXELS, ROWS, WIDE, WIDTH
from onnxpar.cost.cost import messages
from onnxpar.cost.topology import Device, Level, Link, Topology

BOTTLENECK = 2 * PIXELS**2 * NARROW * (2 * WIDE + 9 * NARROW)
"""Multiplications and additions of its three convolutions."""
FASTEST = 1e12
"""Bytes per second of a link of which the size of what goes over it shows nothing."""


def fit(found: Measurements) -> Topology:
    """One level, for as many ranks as are wanted, with a link for each kind of collective."""
    links = {kind: fit_link([t for t in found.talk if t.kind == kind]) for kind in MEASURED}
    other = fit_link(found.talk)
    launch = _digits(found.work.tiny)
    device = Device(
        flops=_digits(2 * ROWS * WIDTH**2 / max(found.work.product - launch, 1e-9)),
        convolution=_digits(BOTTLENECK / max(found.work.bottleneck - 3 * launch, 1e-9)),
        memory_bandwidth=_digits(2 * LARGE / max(found.work.copy - launch, 1e-9)),
        launch=launch,
        row=_digits(max(found.work.picks - launch, 1e-9) / PICKED),
    )
    return Topology((Level("host", None, other.latency, other.bandwidth, links),), device)


def fit_link(talk: Sequence[Talk]) -> Link:
    """The latency and the bandwidth, neither below 0, that come closest to all in proportion."""
    rows = np.array([messages(t.kind, t.ranks, t.size) for t in talk])
    seconds = np.array([[t.seconds] for t in talk])
    (latency, per_byte), _ = nnls(rows / seconds, np.ones(len(rows)))
    return Link(_digits(latency), _digits(1 / max(per_byte, 1 / FASTEST)))


def predicted(talk: Talk, topology: Topology) -> float:
    """Seconds by the topology's first level."""
    rounds, sent = messages(talk.kind, talk.ranks, talk.size)
    link = topology.levels[0].link(talk.kind)
    return rounds * link.latency + sent / link.bandwidth


def lines(found: Measurements, topology: Topology) -> Iterator[str]:
    """The table: of each case, what was measured and what the topology says."""
    work = found.work
    for what, seconds in (
        (f"MatMul of {ROWS}x{WIDTH} by {WIDTH}x{WIDTH}", work.product),
        (f"3 Conv of {WIDE} channels", work.bottleneck),
        (f"Neg of {LARGE >> 20} MiB", work.copy),
        (f"Gather of {PICKED} elements", work.picks),
        ("Neg of one element", work.tiny),
    ):
        yield f"{what:<30}{seconds * 1e6:>9.1f} us"
    yield ""
    yield f"{'collective':<14}{'ranks':>6}{'bytes':>10}{'measured':>12}{'fitted':>12}{'off':>7}"
    for talk in found.talk:
        fitted = predicted(talk, topology)
        yield (
            f"{talk.kind:<14}{talk.ranks:>6}{talk.size:>10}{talk.seconds * 1e6:>9.1f} us"
            f"{fitted * 1e6:>9.1f} us{fitted / talk.seconds - 1:>+7.0%}"
        )


def file_text(found: Measurements, topology: Topology) -> str:
    """The topology file, with comments that say what was measured."""
    threads = "1 thread" if found.threads == 1 else f"{found.threads} threads"
    about = f"""Written by onnxpar calibrate, with {found.ranks} ranks of {threads} at once.
`host` has as many ranks as are wanted; give it a size, and add levels behind it (rack, ...) with
latency and bandwidth, for more than this machine. A rank's memory, for example 16 GB, goes under
device. Collectives have links of their own; latency and bandwidth of a level are for all others."""
    table = ["What was measured, and what the file says:", *lines(found, topology)]
    return _comments(about.splitlines()) + topology.text() + _comments(table)


def _comments(text: Iterable[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in text)


def _digits(value: float) -> float:
    """Four of them: no more are known."""
    return float(f"{value:.4g}")
