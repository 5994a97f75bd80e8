"""Small sharded models, written by hand, and what tests ask of their processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from agreement import TIMEOUT
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, save

from onnxpar.base.errors import OnnxparError
from onnxpar.compiler.plan import write_plan
from onnxpar.layout.layout import Factor, Layout
from onnxpar.layout.mesh import Axis, Mesh
from onnxpar.runtime.ranks.executor import Executor
from onnxpar.runtime.ranks.groups import thread_worlds
from onnxpar.runtime.session.bundle import FORMAT, Bundle
from onnxpar.runtime.session.options import SessionSpec
from onnxpar.runtime.session.session import Session

ELEMENTS = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}


@dataclass(frozen=True)
class Tensor:
    """A port: `layout` has one axis name or None per dimension; a shape of None is data's."""

    name: str
    shape: Sequence[int | None] | None
    layout: Sequence[str | None] | Layout | None = None
    dtype: str = "float32"

    def global_layout(self, mesh: Mesh) -> Layout | None:
        """Its layout over the mesh."""
        if self.shape is None or isinstance(self.layout, Layout):
            return self.layout  # type: ignore[return-value]
        names = self.layout or [None] * len(self.shape)
        return Layout(
            tuple(
                Factor(size, () if name is None else (Axis(name, mesh.sizes[name]),))
                for size, name in zip(self.shape, names, strict=True)
            )
        )


Nodes = Callable[[int], Sequence[NodeProto]]
Weights = Callable[[int], Mapping[str, np.ndarray]]


def all_reduce(x: str, y: str, tag: int = 1, **attributes: Any) -> list[NodeProto]:
    """Nodes that reduce x over all ranks."""
    token = f"{y}_token"
    return [
        helper.make_node(
            "Constant", [], [token], value=numpy_helper.from_array(np.zeros(0, np.bool_))
        ),
        helper.make_node(
            "AllReduce",
            [x, token],
            [y, f"{y}_done"],
            name=y,
            domain="onnxpar",
            tag=tag,
            **attributes,
        ),
    ]


def write_par(
    folder: Path,
    mesh: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    nodes: Nodes,
    weights: Weights = lambda rank: {},
    states: Mapping[str, str] | None = None,
    in_place: Collection[str] = (),
) -> Path:
    """Writes a model.par folder; runs change the states `in_place` in their own memory."""
    ranks = Mesh.parse(mesh)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks.size):
        ports = [
            [_value(tensor, ranks, rank) for tensor in tensors] for tensors in (inputs, outputs)
        ]
        constants = [numpy_helper.from_array(a, n) for n, a in weights(rank).items()]
        graph = helper.make_graph(list(nodes(rank)), "g", *ports, constants)
        save(_model(graph), folder / f"rank_{rank:04d}.onnx")
    plan = {
        "format": FORMAT,
        "model": "hand.onnx",
        "mesh": [list(axis) for axis in ranks.shape],
        "inputs": [_port(tensor, ranks) for tensor in inputs],
        "outputs": [_port(tensor, ranks) for tensor in outputs],
        "states": [
            {"input": i, "output": o, "in_place": i in in_place} for i, o in (states or {}).items()
        ],
    }
    write_plan(folder, plan)
    return folder


def _model(graph: Any) -> ModelProto:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxpar", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _value(tensor: Tensor, mesh: Mesh, rank: int) -> Any:
    layout = tensor.global_layout(mesh)
    sizes = None if layout is None else layout.local_shape(mesh, rank)
    shape = None if sizes is None else [None if s < 0 else s for s in sizes]
    return helper.make_tensor_value_info(tensor.name, ELEMENTS[tensor.dtype], shape)


def _port(tensor: Tensor, mesh: Mesh) -> dict[str, Any]:
    layout = tensor.global_layout(mesh)
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": None if tensor.shape is None else list(tensor.shape),
        "layout": None if layout is None else layout.to_json(),
    }


def k_split(folder: Path, ranks: int = 2, k: int = 7) -> Path:
    """y = x @ w with k split and a reduction, d = x + x split along k; x is split along k."""
    weight = weight_of_k_split(k)
    mesh = Mesh.parse(f"tp={ranks}")
    rows = Layout((Factor(k, (Axis("tp", ranks),)), Factor(3)))
    return write_par(
        folder,
        f"tp={ranks}",
        [Tensor("x", (4, k), (None, "tp"))],
        [Tensor("y", (4, 3)), Tensor("d", (4, k), (None, "tp"))],
        lambda rank: [
            helper.make_node("MatMul", ["x", "w"], ["part"]),
            *all_reduce("part", "y"),
            helper.make_node("Add", ["x", "x"], ["d"]),
        ],
        lambda rank: {"w": np.ascontiguousarray(rows.take(weight, mesh, rank))},
    )


def weight_of_k_split(k: int = 7) -> np.ndarray:
    """The w of `k_split`."""
    return np.random.default_rng(0).standard_normal((k, 3)).astype(np.float32)


def pids(session: Session) -> list[int]:
    """The processes of a session, by rank."""
    return [rank.process.pid for rank in session._ranks._processes.ranks]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def started(folders: Sequence[Path], **options: Any) -> list[str]:
    """Each rank's error at a start from a folder of its own."""
    worlds = thread_worlds(len(folders), TIMEOUT)

    def start(rank: int) -> str:
        try:
            spec = SessionSpec.of(None, **options)
            Executor(Bundle.load(folders[rank]), worlds[rank], spec)
        except OnnxparError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(folders)) as pool:
        said = list(pool.map(start, range(len(folders))))
    for world in worlds:
        world.close()
    return said
