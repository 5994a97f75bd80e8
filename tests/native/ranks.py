"""Small models of collectives, run on threads as ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from onnxpar.runtime.groups import World, session_options

BOOL = TensorProto.BOOL
TOKEN = np.zeros([0], np.bool_)


def model(nodes: Sequence[onnx.NodeProto], inputs: Any, outputs: Any) -> bytes:
    """A model of `nodes`; inputs and outputs are (name, dtype, shape), the tokens `t` and `s`."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(*i) for i in inputs]
        + [helper.make_tensor_value_info("t", BOOL, [0])],
        [helper.make_tensor_value_info(*o) for o in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxpar", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def collective(kind: str, dtype: int, shape: Sequence[Any], **attributes: Any) -> bytes:
    """A model that is one collective: X, t -> Y, s."""
    node = helper.make_node(
        kind, ["X", "t"], ["Y", "s"], name="node", domain="onnxpar", **({"tag": 1} | attributes)
    )
    return model(
        [node],
        [("X", dtype, list(shape))],
        [("Y", dtype, None), ("s", BOOL, [0])],
    )


def session(world: World, model: bytes, threads: int = 1) -> ort.InferenceSession:
    options = session_options(world)
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def on_ranks(worlds: Sequence[World], body: Callable[[World], Any]) -> list[Any]:
    """What `body` returns, or the exception that it raises, on each rank."""

    def guarded(world: World) -> Any:
        try:
            return body(world)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(guarded, worlds))
