"""Sharding rules by op family; importing the package registers them all."""

from onnxpar.rules import attention as attention
from onnxpar.rules import construction as construction
from onnxpar.rules import contraction as contraction
from onnxpar.rules import convolution as convolution
from onnxpar.rules import elementwise as elementwise
from onnxpar.rules import index_tuples as index_tuples
from onnxpar.rules import indexing as indexing
from onnxpar.rules import losses as losses
from onnxpar.rules import movement as movement
from onnxpar.rules import normalization as normalization
from onnxpar.rules import quantization as quantization
from onnxpar.rules import recurrence as recurrence
from onnxpar.rules import reductions as reductions
from onnxpar.rules import resizing as resizing
from onnxpar.rules import scattering as scattering
from onnxpar.rules import segments as segments
