"""Loss scaling, which keeps float16 gradients from underflow: Micikevicius et al., "Mixed Precision
Training" (2018)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from onnxpar.base.errors import StrategyError
from onnxpar.graph.training_spec import LEAST_SCALE, SCALE
from onnxpar.training.gradients.value import Builder, Value

GOOD = f"{SCALE}.good_steps"
"""The name of the input that counts the steps with finite gradients since the factor last
changed."""


@dataclass(frozen=True)
class LossScale:
    """The factor by which the loss is multiplied before it is differentiated.

    initial   the factor at the start
    dynamic   True if a step with infinite or NaN gradients halves the factor and skips the update,
              and `interval` steps in a row with finite gradients double the factor; it is not
              halved below LEAST_SCALE
    interval  see `dynamic`
    """

    initial: float = 65536.0
    dynamic: bool = True
    interval: int = 2000

    @staticmethod
    def parse(text: str | None, precision: str | None) -> LossScale | None:
        """Parses the value of `--loss-scale`: "dynamic" (the default with float16), a number, or
        "none", for which it returns None. Errors: StrategyError."""
        if text is None:
            text = "dynamic" if precision == "float16" else "none"
        if text == "none":
            return None
        if text == "dynamic":
            return LossScale()
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise StrategyError(f"--loss-scale {text!r}: give dynamic, none or a number above 0")
        return LossScale(number, dynamic=False)

    def factor(self, builder: Builder) -> Value:
        """Returns the factor as a tensor: a new input of the graph if it is dynamic, else a
        constant."""
        if not self.dynamic:
            return builder.constant(self.initial, np.float32)
        tensor = gs.Variable(SCALE, np.dtype(np.float32), [])
        tensor.onnx_default = numpy_helper.from_array(np.array(self.initial, np.float32), SCALE)
        builder.graph.inputs.append(tensor)
        return builder.value(tensor)

    def following(self, factor: Value, good: Value, finite: Value) -> tuple[Value, Value]:
        """Returns the next factor, and the next number of steps in a row with finite gradients.
        `factor` and `good` are their values before the step; `finite` says whether the step's
        gradients are finite."""
        enough = (good + 1).op("GreaterOrEqual", self.interval)
        grown = enough.where(factor * 2.0, factor)
        count = enough.where(0, good + 1)
        return finite.where(grown, (factor * 0.5).op("Max", LEAST_SCALE)), finite.where(count, 0)


def is_finite(total: Value) -> Value:
    """Returns a bool tensor: True if a sum over all gradients is finite."""
    return total.op("IsNaN").op("Or", total.op("IsInf")).op("Not")
