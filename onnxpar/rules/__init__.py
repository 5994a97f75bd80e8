"""Sharding rules by op family; importing the package registers them all."""

from onnxpar.rules import contraction as contraction
from onnxpar.rules import elementwise as elementwise
from onnxpar.rules import indexing as indexing
from onnxpar.rules import movement as movement
from onnxpar.rules import normalization as normalization
from onnxpar.rules import reductions as reductions
from onnxpar.rules import segments as segments
