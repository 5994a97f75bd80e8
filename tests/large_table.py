"""A model with a table of 307 MB, and the memory that ranks take for it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

ROWS, WIDTH = 300_000, 256
"""307 MB, which are a hole in the file of the model."""
FEEDS = {"ids": np.array([[7, 7, 1], [0, 2, ROWS - 1], [7, 0, 0], [1, 2, 3]])}
"""Indices that repeat, on both ranks of two."""
LIMIT = 170
"""MB that a rank may take: without a model it takes half of that, with half of the table more."""

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's /proc"
)


def write_model(folder: Path) -> Path:
    """Saves a model that sums up looked-up rows; all rows but row 7, which is ones, are zeros."""
    table = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[ROWS, WIDTH])
    table.data_location = TensorProto.EXTERNAL
    size = ROWS * WIDTH * 4
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(size))):
        table.external_data.add(key=key, value=value)
    with (folder / "w.bin").open("wb") as file:
        file.truncate(size)
        file.seek(7 * WIDTH * 4)
        file.write(np.ones(WIDTH, np.float32).tobytes())
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [4, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, WIDTH])
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("Gather", ["w", "ids"], ["rows"], "lookup"),
        helper.make_node("ReduceSum", ["rows", "axis"], ["y"], "sum", keepdims=0),
    ]
    graph = helper.make_graph(nodes, "lookups", [ids], [y], [axis, table])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def peaks() -> list[float]:
    """The most memory that each child of this process has had, in MB."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue
        if re.search(rf"^PPid:\t{os.getpid()}$", text, re.MULTILINE):
            peak = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
            found.append(int(peak[1]) / 1e3 if peak else 0.0)
    return found
