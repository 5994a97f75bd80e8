"""Small models of collectives, run on threads as ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from onnxpar.runtime.ranks.groups import World, session_options

TOKEN = np.zeros([0], np.bool_)

Value = tuple[str, int, Sequence[int | str | None] | None]


def model(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[Value], outputs: Sequence[Value]
) -> bytes:
    """A model of `nodes` with the given (name, dtype, shape) and the token input `t`."""
    token: Value = ("t", TensorProto.BOOL, [0])
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(*value) for value in [*inputs, token]],
        [helper.make_tensor_value_info(*value) for value in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxpar", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def node(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, outputs, domain="onnxpar", **attributes)


def collective(
    kind: str, dtype: int, shape: Sequence[int | str | None], **attributes: Any
) -> bytes:
    """A model of one collective named "node": X, t -> Y, s."""
    attributes = {"tag": 1, "name": "node"} | attributes
    return model(
        [node(kind, ["X", "t"], ["Y", "s"], **attributes)],
        [("X", dtype, shape)],
        [("Y", dtype, None), ("s", TensorProto.BOOL, [0])],
    )


def session(world: World, model: bytes) -> ort.InferenceSession:
    options = session_options(world)
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # the errors that tests provoke
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(world: World, model: bytes, *inputs: np.ndarray) -> np.ndarray:
    """Output Y on this rank, of a model with input X."""
    [y] = session(world, model).run(["Y"], {"X": inputs[world.rank], "t": TOKEN})
    return y


def on_ranks(worlds: Sequence[World], body: Callable[[World], Any]) -> list[Any]:
    """What `body` returns on each rank, each a thread; raises what one of them raised."""
    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(body, worlds))


def errors_on_ranks(worlds: Sequence[World], body: Callable[[World], Any]) -> list[str]:
    """The message of what `body` raises on each rank; it must raise on all."""

    def error(world: World) -> str:
        try:
            result = body(world)
        except Exception as raised:
            return str(raised)
        raise AssertionError(f"rank {world.rank} did not raise, but returned {result}")

    return on_ranks(worlds, error)
