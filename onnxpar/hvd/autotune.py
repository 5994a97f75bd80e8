"""Chooses the fusion threshold and the cycle time with which ranks reduce the most bytes per
second.

As in Horovod, a Gaussian process models the measured speeds. The next pair of values to try is that
of the largest expected improvement (Jones et al. 1998), from 0 to 64 MiB and from 1 to 100 ms.
"""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError

Knobs = tuple[float, float]
MEBIBYTE = 1 << 20
BOUNDS = np.array([[0.0, 64.0], [1.0, 100.0]])
FIRST = ((4.0, 5.0), (32.0, 50.0), (16.0, 25.0), (8.0, 10.0))
"""The first values to try, of MiB and ms."""
SAMPLES = 5
"""Measurements at the same values; their median counts."""
CANDIDATES = 2000


@dataclass
class Autotune:
    """Measures the speed of cycles, and chooses the fusion threshold and cycle time of the next
    ones. Only rank 0 has an Autotune; the other ranks take the values of rank 0.

    log                a file that gets a row for each pair of values; the last row is the best
    warmup_samples     pairs of values, at the start, whose speed is not used
    steps_per_sample   cycles of one measurement
    max_samples        pairs of values to try
    noise              standard deviation of a measurement, relative to that of all measurements
    active             False when all pairs are tried, and the best is in use
    tried, scores      the pairs so far, in MiB and ms, and the bytes per second of each
    """

    log: str | Path | None = None
    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_samples: int = 20
    noise: float = 0.8
    active: bool = True
    tried: list[Knobs] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bytes, self._seconds, self._steps = 0, 0.0, 0
        self._samples: list[float] = []
        self._random = np.random.default_rng(0)
        if self.log:
            self._write("cycle_time_ms,tensor_fusion_threshold,score\n", "w")

    @staticmethod
    def of_environment() -> Autotune | None:
        """Returns the tuner that HOROVOD_AUTOTUNE=1 and its sibling variables request; None without
        them. Errors: InputError for a value that is not a number."""
        if os.environ.get("HOROVOD_AUTOTUNE", "0") in ("", "0"):
            return None
        return Autotune(
            os.environ.get("HOROVOD_AUTOTUNE_LOG"),
            int(number("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3)),
            int(number("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10)),
            int(number("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 20)),
            number("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", 0.8),
        )

    def record(self, sent: int, seconds: float, knobs: Knobs) -> Knobs:
        """Counts a cycle that has reduced `sent` bytes, and returns the values for the next cycle.

        seconds  time of the cycle's collectives, without the wait (the cycle time) before them
        knobs    the values of this cycle: fusion threshold in bytes, cycle time in milliseconds
        """
        if not self.active:
            return knobs
        self._bytes += sent
        self._seconds += seconds + knobs[1] / 1000
        self._steps += 1
        if self._steps < self.steps_per_sample:
            return knobs
        self._samples.append(self._bytes / self._seconds)
        self._bytes, self._seconds, self._steps = 0, 0.0, 0
        if len(self._samples) < SAMPLES:
            return knobs
        score, self._samples = statistics.median(self._samples), []
        if self.warmup_samples > 0:
            self.warmup_samples -= 1
            return knobs
        return self._next(score, (knobs[0] / MEBIBYTE, knobs[1]))

    def _next(self, score: float, tried: Knobs) -> Knobs:
        """Records the score of a pair of values in MiB and ms, and returns the pair to use next, in
        bytes and ms: the best pair if `max_samples` are tried."""
        self.tried.append(tried)
        self.scores.append(score)
        self._row(tried, score)
        if len(self.tried) >= self.max_samples:
            self.active = False
            best = int(np.argmax(self.scores))
            chosen = self.tried[best]
            self._row(chosen, self.scores[best])
        elif len(self.tried) <= len(FIRST):
            chosen = FIRST[len(self.tried) - 1]
        else:
            chosen = self._most_promising()
        return chosen[0] * MEBIBYTE, chosen[1]

    def _most_promising(self) -> Knobs:
        """Returns the pair of values, in MiB and ms, with the largest expected improvement over the
        best pair so far, among random candidates."""
        low, high = BOUNDS[:, 0], BOUNDS[:, 1]
        known = (np.array(self.tried) - low) / (high - low)
        scores = np.array(self.scores)
        spread = scores.std() or 1.0
        scaled = (scores - scores.mean()) / spread
        candidates = self._random.random((CANDIDATES, 2))
        mean, deviation = gaussian_process(known, scaled, candidates, self.noise)
        gain = mean - scaled.max()
        z = gain / deviation
        normal = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * (1 + math.erf(each / math.sqrt(2))) for each in z])
        best = candidates[int(np.argmax(gain * below + deviation * normal))]
        values = low + best * (high - low)
        return float(values[0]), float(values[1])

    def _row(self, knobs: Knobs, score: float) -> None:
        """Appends a pair of values (MiB, ms) and its bytes per second to the log, if there is a
        log."""
        if self.log:
            self._write(f"{knobs[1]:g},{knobs[0]:g},{score:g}\n", "a")

    def _write(self, text: str, mode: str) -> None:
        assert self.log
        try:
            with Path(self.log).open(mode) as file:
                file.write(text)
        except OSError as error:
            raise InputError(f"HOROVOD_AUTOTUNE_LOG={self.log}: {error}") from error


def gaussian_process(
    known: Array, values: Array, wanted: Array, noise: float
) -> tuple[Array, Array]:
    """Returns the mean and the standard deviation of a Gaussian process at each wanted point.

    known   the measured points, one per row
    values  the value at each measured point
    wanted  the points to predict, one per row
    noise   standard deviation of the values

    The kernel is a squared exponential of length 0.3 (Rasmussen and Williams, algorithm 2.1).
    """

    def kernel(a: Array, b: Array) -> Array:
        distance = ((a[:, None, :] - b[None, :, :]) ** 2).sum(-1)
        covariance: Array = np.exp(-distance / (2 * 0.3**2))
        return covariance

    lower = np.linalg.cholesky(kernel(known, known) + noise**2 * np.eye(len(known)))
    weights = np.linalg.solve(lower.T, np.linalg.solve(lower, values))
    between = kernel(known, wanted)
    mean: Array = between.T @ weights
    reduced = np.linalg.solve(lower, between)
    deviation: Array = np.sqrt(np.maximum(1 - (reduced**2).sum(0), 1e-12))
    return mean, deviation


def number(variable: str, default: float) -> float:
    """Returns the number in an environment variable, or `default` if the variable is not set.
    Errors: InputError for a text that is not a finite number of at least 0."""
    text = os.environ.get(variable) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"{variable}={text!r} must be a number of at least 0")
    return value
