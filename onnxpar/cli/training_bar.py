"""The progress bar of a training run on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from onnxpar.runtime.ranks.closing import Closing


class Bar(Closing):
    """The progress bar of a training run, on a terminal only: number of samples so far, samples per
    second, remaining time, and the last loss.

    steps  number of steps of the run; None if unknown before its end
    batch  number of samples in a step
    """

    def __init__(self, steps: int | None, batch: int) -> None:
        self._batch = batch
        self._bar: tqdm[None] | None = None
        self._total = None if steps is None else steps * batch

    def show(self, step: int, lines: Sequence[str], loss: float) -> None:
        """Advances the bar to `step`, the number of steps so far, and prints `lines` above it. The
        rate does not count steps of an earlier, resumed run."""
        if self._bar is None:
            self._bar = tqdm(
                total=self._total,
                initial=(step - 1) * self._batch,
                unit="sample",
                unit_scale=True,
                disable=not sys.stderr.isatty(),
                leave=False,
            )
        self._bar.set_postfix({"loss": f"{loss:.4g}"}, refresh=False)
        self._bar.update(step * self._batch - self._bar.n)
        for line in lines:
            self._bar.write(line, sys.stdout)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
