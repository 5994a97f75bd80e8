"""Training steps as ONNX graphs.

step = onnxpar.training.grad(
    "gpt2.onnx", "step.onnx", loss="softmax-cross-entropy", optimizer="adamw", clip_norm=1.0
)
"""

from onnxpar.step import Slot as Slot
from onnxpar.step import Step as Step
from onnxpar.training.api import grad as grad
from onnxpar.training.optimizers import Optimizer as Optimizer

__all__ = ["Optimizer", "Slot", "Step", "grad"]
