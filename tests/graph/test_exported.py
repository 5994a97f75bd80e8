"""What torch.export says of a node."""

from __future__ import annotations

import onnx_graphsurgeon as gs
import pytest
from onnx import NodeProto

from onnxpar.graph.exported import call_of


def call(target: str, arguments: str) -> gs.Node:
    """A node with metadata in the form of torch 2.13."""
    what = f"call_function[target=torch.ops.aten.{target}]"
    text = f"%e : [num_users=1] = {what}(args = ({arguments}), kwargs = {{}})"
    node, source = gs.Node("Gather", "n", {}, [], []), NodeProto()
    source.metadata_props.add(key="pkg.torch.onnx.fx_node", value=text)
    node.onnx_source = source
    return node


@pytest.mark.parametrize(
    ("target", "arguments", "row"),
    [
        ("embedding.default", "%p_w, %x, 0", 0),
        ("embedding.default", "%p_w, %x, 12, False, True", 12),
        ("embedding.default", "%p_w, %x, -1, True", None),
        ("embedding.default", "%p_w, %x", None),
        ("embedding_bag.padding_idx", "%p_w, %v, %a, False, 0, False, None, False, 2", 2),
        ("embedding_bag.padding_idx", "%p_w, %v, %a, False, 0, False, None, False, None", None),
        ("mul.Tensor", "%a, %b, 3", None),
    ],
)
def test_rows_for_padding(target: str, arguments: str, row: int | None) -> None:
    found = call_of(call(target, arguments))
    assert found is not None and found.padding_row == row
    assert found.scales_by_frequency == (arguments == "%p_w, %x, -1, True")


def test_tensors_that_a_call_reads() -> None:
    found = call_of(call("cat.default", "[%detach_1, %sigmoid], 1"))
    assert found is not None and found.tensors == ["detach_1", "sigmoid"]
    assert found.detached == [0] and not found.is_detach
    assert call_of(gs.Node("Gather", "n", {}, [], [])) is None
