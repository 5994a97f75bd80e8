"""Rewrites mixtures of experts, in the forms that exporters write, with the expert as a dimension
of the weights and of all tensors in between.

torch has no op for a mixture. Loops over experts are exported as one subgraph for each expert, and
Hugging Face's other forms gather a matrix for each token, or sort tokens by expert. In none of them
is the expert a dimension that can be split.
"""

from __future__ import annotations

from pathlib import Path

import onnx_graphsurgeon as gs

from onnxpar.canonicalize.dense_experts import OPSET
from onnxpar.canonicalize.gathered_experts import gathered_mixtures
from onnxpar.canonicalize.scattered_experts import scattered_mixtures


def stack_experts(graph: gs.Graph, folder: Path, apart: bool = True) -> None:
    """Rewrites each mixture of the graph whose experts compute the same steps, in place. `folder`
    has the model's external data. Without `apart`, mixtures whose experts have weights of their own
    stay as they are: trained weights keep their names and shapes."""
    if graph.opset >= OPSET:
        scattered_mixtures(graph, folder, apart)
        gathered_mixtures(graph, folder)
