"""The settings of losses, and which losses have them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import StrategyError
from onnxpar.training.margins import DEFAULT_MARGIN, MARGINS, Margin

CROSS_ENTROPY = "softmax-cross-entropy"
BY_LABEL = (CROSS_ENTROPY, "nll", *MARGINS)
"""The losses whose targets are class numbers."""
DIVERGENCES = ("kl", "kl-mean")
WITH_DELTA = ("huber", "smooth-l1")
_OF: Mapping[str, Sequence[str]] = {
    "--class-axis": (*BY_LABEL, *DIVERGENCES),
    "--label-smoothing": (CROSS_ENTROPY,),
    "--class-weights": BY_LABEL,
    "--delta": WITH_DELTA,
    "--pos-weight": ("bce",),
}
"""The losses that have a setting, by the setting's option."""

Numbers = str | os.PathLike[str] | Sequence[float] | Array | float
"""Numbers as a user gives them: a number, a sequence, text such as "1,2,0.5", or an .npy file."""


@dataclass(frozen=True)
class LossSettings:
    """Settings of losses, named like the options of `grad`. Each holds for some losses only; None
    is the default."""

    class_axis: int | None = None
    margin: Margin = DEFAULT_MARGIN
    label_smoothing: float | None = None
    class_weights: tuple[float, ...] | None = None
    delta: float | None = None
    pos_weight: tuple[float, ...] | None = None

    def class_axis_of(self, rank: int) -> int:
        """Returns the dimension of classes of an output with this number of dimensions. The default
        is the last, or 1 of four or more."""
        return (rank - 1 if rank < 4 else 1) if self.class_axis is None else self.class_axis

    def __post_init__(self) -> None:
        """Checks the numbers. Errors: StrategyError if one is out of range."""
        smoothing, delta = self.label_smoothing, self.delta
        if smoothing is not None and not 0 <= smoothing <= 1:
            raise StrategyError(f"--label-smoothing {smoothing}: must be from 0 to 1")
        if delta is not None and not 0 < delta < float("inf"):
            raise StrategyError(f"--delta {delta}: must be above 0")

    def check(self, loss: str) -> None:
        """Checks that a loss has all settings that are not None. Errors: StrategyError."""
        self.margin.check(loss)
        settings = {
            "--class-axis": self.class_axis,
            "--label-smoothing": self.label_smoothing,
            "--class-weights": self.class_weights,
            "--delta": self.delta,
            "--pos-weight": self.pos_weight,
        }
        for option, value in settings.items():
            if value is not None and loss not in _OF[option]:
                raise StrategyError(
                    f"{option}: the loss {loss!r} has none; only {', '.join(_OF[option])} have; "
                    f"leave {option} out"
                )


DEFAULT_SETTINGS = LossSettings()


def numbers_of(option: str, given: Numbers | None) -> tuple[float, ...] | None:
    """Returns the numbers that a user gives for an option; None stays None. Errors: StrategyError
    unless they are finite and 0 or more."""
    if given is None:
        return None
    try:
        if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".npy")):
            given = np.load(Path(given), allow_pickle=False)
        elif isinstance(given, str):
            given = [float(part) for part in given.split(",")]
        numbers = np.asarray(given, np.float64)
    except (OSError, ValueError, EOFError) as error:
        raise StrategyError(
            f"{option} {given}: give numbers, such as 1,2,0.5, or an .npy file of them ({error})"
        ) from None
    if numbers.ndim > 1 or not numbers.size or not (np.isfinite(numbers) & (numbers >= 0)).all():
        raise StrategyError(
            f"{option}: give a vector of finite numbers that are 0 or more; these have the shape "
            f"{list(numbers.shape)}"
        )
    return tuple(numbers.reshape(-1).tolist())
