"""Gradient rules of ONNX ops, one module per family of ops; importing this package registers all
rules."""

from onnxpar.training.gradients import activations as activations
from onnxpar.training.gradients import attention as attention
from onnxpar.training.gradients import collectives as collectives
from onnxpar.training.gradients import construction as construction
from onnxpar.training.gradients import contraction as contraction
from onnxpar.training.gradients import control_flow as control_flow
from onnxpar.training.gradients import convolution as convolution
from onnxpar.training.gradients import deformable as deformable
from onnxpar.training.gradients import einsum as einsum
from onnxpar.training.gradients import elementwise as elementwise
from onnxpar.training.gradients import image_sampling as image_sampling
from onnxpar.training.gradients import indexing as indexing
from onnxpar.training.gradients import losses as losses
from onnxpar.training.gradients import movement as movement
from onnxpar.training.gradients import normalization as normalization
from onnxpar.training.gradients import pooling as pooling
from onnxpar.training.gradients import recurrence as recurrence
from onnxpar.training.gradients import reductions as reductions
from onnxpar.training.gradients import resizing as resizing
from onnxpar.training.gradients import scattering as scattering
from onnxpar.training.gradients import signal as signal
from onnxpar.training.gradients import without as without
