"""Training steps as ONNX graphs.

Write a step, shard it, train, and merge the trained weights into the model:

step = onnxpar.training.grad(
    "gpt2.onnx", "step.onnx", loss="softmax-cross-entropy", optimizer="adamw", clip_norm=1.0
)
onnxpar.shard("step.onnx", "step.par", devices=8, preset="zero3")
records = onnxpar.training.train("step.par", "train.npz", lr=1e-3, checkpoint="run")
onnxpar.training.merge("run", "gpt2.onnx", "trained.onnx")
"""

from onnxpar.graph.training_spec import Slot as Slot
from onnxpar.graph.training_spec import Step as Step
from onnxpar.trainer.api import grad as grad
from onnxpar.trainer.api import train as train
from onnxpar.trainer.export_weights import export_weights as export_weights
from onnxpar.trainer.grad_options import GradOptions as GradOptions
from onnxpar.trainer.loop import Record as Record
from onnxpar.trainer.merge import merge as merge
from onnxpar.trainer.train_options import TrainOptions as TrainOptions
from onnxpar.trainer.trainer import Trainer as Trainer
from onnxpar.training.optimizer import Optimizer as Optimizer

__all__ = [
    "GradOptions",
    "Optimizer",
    "Record",
    "Slot",
    "Step",
    "TrainOptions",
    "Trainer",
    "export_weights",
    "grad",
    "merge",
    "train",
]
