"""Fits a topology to measurements by least squares, and prints how far they are apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.cost.calibration_models import FEW, NARROW, PICKED, PIXELS, RATED, ROWS, WIDE, WIDTH
from onnxpar.cost.cost import messages
from onnxpar.cost.device import Rate
from onnxpar.cost.measure import (
    CHANNELS,
    COPIED,
    LARGE,
    MEASURED,
    MIDDLE,
    NEAR,
    CollectiveTime,
    Measurements,
    Work,
)
from onnxpar.cost.topology import Device, Level, Link, Session, Topology

BOTTLENECK = 2 * PIXELS**2 * NARROW * (2 * WIDE + 9 * NARROW)
"""Floating-point operations of the three convolutions of a measured bottleneck."""
SAME = 1.4
"""A convolution computes 2n channels at once if they take less than this many times the time of n.
The value is the geometric mean of 1 and 2."""
FASTEST = 1e12
"""A fitted bandwidth is at most this, in bytes per second, for times that do not grow with the
size."""


def fit(measurements: Measurements) -> Topology:
    """Returns the topology that explains the measurements: one host for any number of ranks, with a
    link for each kind of collective."""
    by_kind = {kind: [t for t in measurements.collectives if t.kind == kind] for kind in MEASURED}
    links = {kind: fit_link(times) for kind, times in by_kind.items()}
    other = fit_link(measurements.collectives)
    host = Level("host", None, other.latency, other.bandwidth, links, measurements.ranks)
    device, alone = fit_device(measurements.work), fit_device(measurements.alone)
    session = fit_session(measurements.session) if measurements.session else None
    return Topology((host,), device, alone=alone, session=session)


def fit_session(times: Sequence[tuple[int, int, float]]) -> Session:
    """Returns the Session that explains three measured runs (ranks, bytes, seconds): few bytes on
    one rank, few bytes on all ranks, and many bytes on all ranks."""
    (single, few, alone), (ranks, _, least), (_, many, most) = times
    bandwidth = min((many - few) / max(most - least, 1e-9), FASTEST)
    rank = max(least - alone, 0.0) / (ranks - single)
    latency = max(least - rank * ranks - few / bandwidth, 0.0)
    return Session(_digits(latency), _digits(bandwidth), _digits(rank))


def fit_device(work: Work) -> Device:
    """Returns the Device that explains the measured seconds of ops."""
    launch = _digits(work.tiny)
    device = Device(
        flops=_digits(2 * ROWS * WIDTH**2 / max(work.product - launch, 1e-9)),
        convolution=_digits(BOTTLENECK / max(work.bottleneck - 3 * launch, 1e-9)),
        memory_bandwidth=_digits(2 * LARGE / max(work.copies[-1] - launch, 1e-9)),
        launch=launch,
        row=_digits(max(work.picks - launch, 1e-9) / PICKED),
        channels=channels_at_once(work.narrow),
    )
    device = with_exposed(with_cache(device, work.copies), work.few, work.apart)
    rates = {kind: fit_rate(kind, times, device) for kind, times in work.rated.items()}
    return replace(device, ops=rates)


def channels_at_once(seconds: Sequence[float]) -> float | None:
    """Returns how many output channels a convolution computes at once: the largest number in
    CHANNELS that takes no longer than half as many channels. None if each number takes longer.

    seconds  of a convolution to each number of channels in CHANNELS
    """
    blocks = [
        more
        for (_, fewer_took), (more, took) in pairwise(zip(CHANNELS, seconds, strict=True))
        if took < SAME * fewer_took
    ]
    return float(max(blocks)) if blocks else None


def with_cache(device: Device, copies: Sequence[float]) -> Device:
    """Returns the device with a cache, from the seconds of copies of NEAR, MIDDLE and LARGE bytes:
    the cache is as fast as the small copy, and as large as explains the middle one. Unchanged if
    the small copy is no faster than the large one."""
    near, middle, _ = copies
    fast = 2 * NEAR / max(near - device.launch, 1e-9)
    if fast <= device.memory_bandwidth:
        return device
    slower = 1 / device.memory_bandwidth - 1 / fast
    saved = 2 * MIDDLE / device.memory_bandwidth - (middle - device.launch)
    cache = min(max(saved / slower, 2 * NEAR), 2 * LARGE)
    return replace(device, cache=_digits(cache), cache_bandwidth=_digits(fast))


def with_exposed(device: Device, few: float, apart: float) -> Device:
    """Returns the device with `exposed` (how much of the reading of memory computing cannot hide).

    few    seconds of a matrix product with few rows
    apart  seconds of such a product whose weight comes from memory, not from the cache
    """
    compute = few - device.launch
    memory = 4 * WIDTH**2 / device.memory_bandwidth
    beyond = apart - device.launch - max(compute, memory)
    exposed = min(beyond / min(compute, memory), 1.0)
    return replace(device, exposed=_digits(exposed) if exposed > 0 else None)


def fit_rate(kind: str, seconds: Sequence[float], device: Device) -> Rate:
    """Returns the Rate of a kind of op: seconds per row and per element, at least 0, which explain
    what is left of the measured `seconds` (one for each shape in RATED) after the device's other
    quantities."""
    took = np.array(seconds)
    explained = np.array([explained_seconds(kind, *shape, device) for shape in RATED[kind]])
    work = np.array([rows_and_elements(kind, *shape) for shape in RATED[kind]])
    row, element = _least_squares(work / took[:, None], np.maximum(1 - explained / took, 0))
    return Rate(_digits(row), _digits(element))


def rows_and_elements(kind: str, rows: int, length: int) -> tuple[int, int]:
    """Returns how many rows and elements, as rates count them, an op that `rated` builds has."""
    if kind == "Erf":
        return 0, rows * length
    return rows, rows * length * (length if kind == "MatMul" else 1)


def explained_seconds(kind: str, rows: int, length: int, device: Device) -> float:
    """Returns the seconds that the device predicts without rates for an op that `rated` builds."""
    row = device.row or 0.0
    size = 4 * rows_and_elements(kind, rows, length)[1]
    if kind == "MatMul":
        flops = 2 * rows * length**3
        return (
            device.launch + max(flops / device.flops, device.move(3 * size)) + rows * length * row
        )
    return device.launch + device.move(2 * size) + (0.0 if kind == "Erf" else rows * row)


def fit_link(times: Sequence[CollectiveTime]) -> Link:
    """Returns the link (latency and bandwidth, at least 0) that minimizes the squares of relative
    errors of these times."""
    rows = np.array([messages(t.kind, t.ranks, t.size) for t in times])
    seconds = np.array([[t.seconds] for t in times])
    latency, per_byte = _least_squares(rows / seconds, np.ones(len(rows)))
    return Link(_digits(latency), _digits(1 / max(per_byte, 1 / FASTEST)))


def _least_squares(rows: Array, values: Array) -> Array:
    """Returns non-negative coefficients x that minimize |rows @ x - values|."""
    from scipy.optimize import nnls  # takes half a second to import

    coefficients: Array = nnls(rows, values)[0]
    return coefficients


def predict_seconds(time: CollectiveTime, topology: Topology) -> float:
    """Returns the seconds that the topology's innermost level predicts for a measured
    collective."""
    rounds, sent = messages(time.kind, time.ranks, time.size)
    link = topology.levels[0].link(time.kind)
    return rounds * link.latency + sent / link.bandwidth


def lines(measurements: Measurements, topology: Topology) -> Iterator[str]:
    """Yields the lines of a table of all measured times; for collectives, beside the fitted
    times."""
    ranks = f"each of {measurements.ranks} ranks"
    yield f"{'':<30}{ranks:>18}{'one rank alone':>18}"
    both = zip(_seconds_of(measurements.work), _seconds_of(measurements.alone), strict=True)
    for (what, seconds), (_, alone) in both:
        yield f"{what:<30}{seconds * 1e6:>15.1f} us{alone * 1e6:>15.1f} us"
    for count, size, seconds in measurements.session:
        what = f"a run over {count} {'rank' if count == 1 else 'ranks'}, {size >> 10} KiB"
        yield f"{what:<30}{seconds * 1e6:>15.1f} us"
    yield ""
    yield f"{'collective':<18}{'ranks':>6}{'bytes':>10}{'measured':>12}{'fitted':>12}{'off':>7}"
    for time in measurements.collectives:
        fitted = predict_seconds(time, topology)
        yield (
            f"{time.kind:<18}{time.ranks:>6}{time.size:>10}{time.seconds * 1e6:>9.1f} us"
            f"{fitted * 1e6:>9.1f} us{fitted / time.seconds - 1:>+7.0%}"
        )


def _seconds_of(work: Work) -> list[tuple[str, float]]:
    """Returns (description of an op, measured seconds) for each measured op."""
    return [
        (f"MatMul of {ROWS}x{WIDTH} by {WIDTH}x{WIDTH}", work.product),
        (f"MatMul of {FEW}x{WIDTH}", work.few),
        (f"MatMul of {FEW}x{WIDTH}, from memory", work.apart),
        (f"3 Conv of {WIDE} channels", work.bottleneck),
        *((f"Neg of {n >> 10} KiB", t) for n, t in zip(COPIED, work.copies, strict=True)),
        (f"Gather of {PICKED} elements", work.picks),
        ("an op on one element", work.tiny),
        *((f"Conv to {n} channels", t) for n, t in zip(CHANNELS, work.narrow, strict=True)),
        *(
            (f"{kind} of {rows}x{length}", t)
            for kind, shapes in RATED.items()
            for (rows, length), t in zip(shapes, work.rated[kind], strict=True)
        ),
    ]


def file_text(measurements: Measurements, topology: Topology) -> str:
    """Returns the content of a topology file (YAML), with the measurements as comments."""
    threads = "1 thread" if measurements.threads == 1 else f"{measurements.threads} threads"
    about = f"""Written by onnxpar calibrate, with {measurements.ranks} ranks of {threads} at once.
`host` has any number of ranks; more than `at_once` take turns. For more than this machine, give it
a size, and add levels after it (rack, ...) with latency and bandwidth. Memory of a rank, such as
16 GB, goes under device. `alone` is one rank with all cores, as onnxruntime is, and `session` what
a run takes besides the work of ranks.
Each collective listed has its own link; latency and bandwidth of the level are for all others."""
    table = ["Measured times, and those that this file predicts:", *lines(measurements, topology)]
    return _comments(about.splitlines()) + topology.text() + _comments(table)


def _comments(text: Iterable[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in text)


def _digits(value: float) -> float:
    """Rounds a number to four significant digits; further digits are noise."""
    return float(f"{value:.4g}")
