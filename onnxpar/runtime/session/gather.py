"""Gathers bytes of all ranks on every rank, with one AllGather in an onnxruntime session."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from onnxpar.base.arrays import Array
from onnxpar.runtime.ranks import groups
from onnxpar.runtime.session.device import HOST

TAG = (1 << 62) - 1
"""A tag that no collective of a model has."""


class Gather:
    """A session with a single AllGather of bytes. Call it only between runs of the other sessions
    in the world."""

    def __init__(self, world: groups.World) -> None:
        options = groups.session_options(world)
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(
            _model(world.size), options, providers=[HOST.provider], enable_fallback=0
        )

    def __call__(self, payload: Array, size: int) -> Array:
        """Returns an array with the payload of rank i in row i, padded with zeros to `size` bytes;
        all ranks must give the same `size`."""
        row = np.zeros((1, size), np.uint8)
        row[0, : payload.size] = payload
        (rows,) = self._session.run(["rows"], {"row": row, "token": np.zeros(0, np.bool_)})
        return np.asarray(rows)


def _model(ranks: int) -> bytes:
    """The ONNX model with the AllGather."""
    from onnx import TensorProto, helper  # sessions that start processes do not need these

    node = helper.make_node(
        "AllGather",
        ["row", "token"],
        ["rows", "done"],
        name="outputs",
        domain="onnxpar",
        axis=0,
        sizes=[1] * ranks,
        tag=TAG,
    )
    byte, flag = TensorProto.UINT8, TensorProto.BOOL
    graph = helper.make_graph(
        [node],
        "gather_outputs",
        [
            helper.make_tensor_value_info("row", byte, [1, "bytes"]),
            helper.make_tensor_value_info("token", flag, [0]),
        ],
        [helper.make_tensor_value_info("rows", byte, [ranks, "bytes"])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxpar", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(model.SerializeToString())
