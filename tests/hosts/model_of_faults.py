"""The model that ranks run over links that fail: its results are integers, exact in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxpar

ROWS, WIDTH = 600, 480
"""A result of more than 1 MB. The width divides by every number of ranks up to 6."""

Array = np.ndarray[Any, np.dtype[np.float32]]


def weights() -> list[Array]:
    numbers = np.arange(WIDTH * WIDTH)
    found = []
    for step in (7, 11):
        sparse = np.where(numbers * step % 97 == 0, numbers * step % 3 + 1, 0)
        found.append(sparse.astype("f4").reshape(WIDTH, WIDTH))
    return found


def feeds(turn: int) -> Array:
    return ((np.arange(ROWS * WIDTH) + turn) % 7 - 3).astype("f4").reshape(ROWS, WIDTH)


def expected(x: Array) -> Array:
    first, second = weights()
    return np.maximum(x @ first, 0) @ second


def shard_for(ranks: int, folder: Path) -> Path:
    """The folder of the model over so many ranks, which is made if it is not there yet."""
    sharded = folder / f"faults-{ranks}.par"
    if sharded.exists():
        return sharded
    first, second = (
        numpy_helper.from_array(weight, name) for weight, name in zip(weights(), "ab", strict=True)
    )
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y"]),
    ]
    shape = [ROWS, WIDTH]
    graph = helper.make_graph(
        nodes,
        "faults",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [first, second],
    )
    path = folder / "faults.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    onnxpar.shard(path, sharded, devices=ranks, preset="tensor-parallel")
    return sharded
