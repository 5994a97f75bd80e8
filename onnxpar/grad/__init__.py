"""Gradient rules of ONNX ops, one module per family of ops; importing this package registers all
rules."""

from onnxpar.grad import activations as activations
from onnxpar.grad import attention as attention
from onnxpar.grad import collectives as collectives
from onnxpar.grad import construction as construction
from onnxpar.grad import contraction as contraction
from onnxpar.grad import control_flow as control_flow
from onnxpar.grad import convolution as convolution
from onnxpar.grad import deformable as deformable
from onnxpar.grad import einsum as einsum
from onnxpar.grad import elementwise as elementwise
from onnxpar.grad import indexing as indexing
from onnxpar.grad import losses as losses
from onnxpar.grad import movement as movement
from onnxpar.grad import normalization as normalization
from onnxpar.grad import pooling as pooling
from onnxpar.grad import recurrence as recurrence
from onnxpar.grad import reductions as reductions
from onnxpar.grad import resizing as resizing
from onnxpar.grad import sampling as sampling
from onnxpar.grad import scattering as scattering
from onnxpar.grad import signal as signal
from onnxpar.grad import without as without
