"""Changes int8 to uint8 between QuantizeLinear and DequantizeLinear, if ranks exchange the
quantized tensor between the two.

On x86, onnxruntime computes with uint8: it changes the type between a QuantizeLinear and its only
reader, a DequantizeLinear, and fuses only nodes of equal types. A collective between the two nodes
prevents that change, so it is made here. Dequantized values stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.reshards import is_reshard
from onnxpar.graph.tensors import constant, dtype_of, given

_DEQUANTIZE, _QUANTIZE = "DequantizeLinear", "QuantizeLinear"
_SHIFT = 128


def exchange_unsigned(graph: gs.Graph) -> None:
    """Changes int8 to uint8, in place, between each QuantizeLinear and its only DequantizeLinear,
    if ranks exchange a tensor between any such pair. Outputs of the graph and tensors with other
    readers stay int8."""
    results = {id(tensor) for tensor in graph.outputs}
    paths = [list(_between(n)) for n in graph.nodes if n.op == _QUANTIZE and _is_signed(n, 0)]
    paths = [path for path in paths if _may_change(path, results)]
    if any(_exchanges(node) for path in paths for _, node in path):
        for path in paths:
            _change_type(path)


def _between(node: gs.Node) -> Iterator[tuple[gs.Tensor, gs.Node]]:
    """Yields (tensor, reader) for each reader of the result of a QuantizeLinear, and of the results
    of collectives that read it."""
    for tensor in node.outputs:
        for reader in tensor.outputs:
            yield tensor, reader
            if _exchanges(reader):
                yield from _between(reader)


def _exchanges(node: gs.Node) -> bool:
    """True for a node by which ranks communicate: a reshard, or a collective of a lowered op."""
    return is_reshard(node) or node.domain == DOMAIN


def _may_change(path: list[tuple[gs.Tensor, gs.Node]], results: set[int]) -> bool:
    """True if the tensors on a path end at a single DequantizeLinear of int8, and none of them is
    an output; `results` has the ids of outputs."""
    ends = [node for _, node in path if not _exchanges(node)]
    is_pair = len(ends) == 1 and ends[0].op == _DEQUANTIZE and _is_signed(ends[0], 1)
    return is_pair and not any(id(tensor) in results for tensor, _ in path)


def _is_signed(node: gs.Node, index: int) -> bool:
    """True if the result (`index` 0) or the first operand (1) of a quantizing node is int8, with a
    single stored zero point."""
    tensor = (node.outputs, node.inputs)[index][0]
    point = given(node, 2)
    value = None if point is None else constant(point)
    return value is not None and value.size == 1 and dtype_of(tensor) == np.int8


def _change_type(path: list[tuple[gs.Tensor, gs.Node]]) -> None:
    """Makes the tensors on a path uint8, and shifts the zero points at both ends."""
    maker = path[0][0].inputs[0]
    for node in (maker, *(n for _, n in path if not _exchanges(n))):
        point = constant(node.inputs[2])
        assert point is not None
        shifted = np.asarray(point.astype(np.int16) + _SHIFT, np.uint8)
        node.inputs[2] = gs.Constant(f"{node.name}::unsigned_zero_point", shifted)
    for tensor, reader in path:
        tensor.dtype = np.dtype(np.uint8)
        if _exchanges(reader):
            reader.outputs[0].dtype = np.dtype(np.uint8)  # also one that no node reads
