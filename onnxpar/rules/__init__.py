"""Sharding rules by op family; importing the package registers all rules. The docstring of a rule
function begins with its ops and the rule in the notation of `notation.py`: `m k, k n -> m n` are
the dimensions of all operands, then of all results. Mesh axes may split each factor (m, k, n) that
the docstring does not call whole; a split factor that is in no result leaves partial sums."""

from onnxpar.rules import attention as attention
from onnxpar.rules import cached_attention as cached_attention
from onnxpar.rules import channel_normalization as channel_normalization
from onnxpar.rules import construction as construction
from onnxpar.rules import contraction as contraction
from onnxpar.rules import contrib_attention as contrib_attention
from onnxpar.rules import contrib_branches as contrib_branches
from onnxpar.rules import contrib_elementwise as contrib_elementwise
from onnxpar.rules import contrib_embedding as contrib_embedding
from onnxpar.rules import contrib_experts as contrib_experts
from onnxpar.rules import contrib_images as contrib_images
from onnxpar.rules import contrib_lookup as contrib_lookup
from onnxpar.rules import contrib_normalization as contrib_normalization
from onnxpar.rules import contrib_products as contrib_products
from onnxpar.rules import contrib_rows as contrib_rows
from onnxpar.rules import contrib_whole_ops as contrib_whole_ops
from onnxpar.rules import control_flow as control_flow
from onnxpar.rules import convolution as convolution
from onnxpar.rules import elementwise as elementwise
from onnxpar.rules import fused_attention as fused_attention
from onnxpar.rules import image_sampling as image_sampling
from onnxpar.rules import index_tuples as index_tuples
from onnxpar.rules import indexing as indexing
from onnxpar.rules import linear_attention as linear_attention
from onnxpar.rules import losses as losses
from onnxpar.rules import ml_features as ml_features
from onnxpar.rules import ml_linear as ml_linear
from onnxpar.rules import ml_svm as ml_svm
from onnxpar.rules import ml_trees as ml_trees
from onnxpar.rules import movement as movement
from onnxpar.rules import no_empty_shards as no_empty_shards
from onnxpar.rules import normalization as normalization
from onnxpar.rules import padding as padding
from onnxpar.rules import paged_attention as paged_attention
from onnxpar.rules import pooling as pooling
from onnxpar.rules import quantization as quantization
from onnxpar.rules import random_draws as random_draws
from onnxpar.rules import ranking as ranking
from onnxpar.rules import recurrence as recurrence
from onnxpar.rules import reductions as reductions
from onnxpar.rules import resizing as resizing
from onnxpar.rules import scattering as scattering
from onnxpar.rules import segments as segments
from onnxpar.rules import signal as signal
from onnxpar.rules import whole_ops as whole_ops
