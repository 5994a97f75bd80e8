"""What the runtime reads of a `model.par` folder: the mesh, the ports and the state pairs of its plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (lets np.dtype know bfloat16 and float8_*)
import numpy as np

from onnxpar.errors import ModelError
from onnxpar.layout import Layout
from onnxpar.mesh import Mesh

FORMAT = 1
"""The only format of plan.json that this runtime reads."""

ELEMENTS: Mapping[str, tuple[int, str]] = {
    "float32": (1, "float"),
    "uint8": (2, "uint8"),
    "int8": (3, "int8"),
    "uint16": (4, "uint16"),
    "int16": (5, "int16"),
    "int32": (6, "int32"),
    "int64": (7, "int64"),
    "bool": (9, "bool"),
    "float16": (10, "float16"),
    "float64": (11, "double"),
    "uint32": (12, "uint32"),
    "uint64": (13, "uint64"),
    "bfloat16": (16, "bfloat16"),
    "float8_e4m3fn": (17, "float8e4m3fn"),
    "float8_e4m3fnuz": (18, "float8e4m3fnuz"),
    "float8_e5m2": (19, "float8e5m2"),
    "float8_e5m2fnuz": (20, "float8e5m2fnuz"),
}
"""By dtype name: ONNX's TensorProto number and onnxruntime's word for the element type."""

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class NodeArg:
    """A graph input or output as `onnxruntime.NodeArg` has it; `shape` is the global one."""

    name: str
    type: str
    shape: list[int | None]


@dataclass(frozen=True)
class Port:
    """A graph input or output. What data decides is None: a size, the rank, or the layout (whole)."""

    name: str
    dtype: np.dtype[Any]
    shape: Shape | None
    layout: Layout | None

    @property
    def element(self) -> Any:
        """The element type as onnxruntime takes it: NumPy's, or ONNX's number where NumPy has none."""
        return self.dtype.type if self.dtype.isbuiltin == 1 else ELEMENTS[self.dtype.name][0]

    @property
    def arg(self) -> NodeArg:
        """As onnxruntime would describe it."""
        return NodeArg(self.name, f"tensor({ELEMENTS[self.dtype.name][1]})", list(self.shape or ()))

    def expects(self) -> str:
        """`float32 [8, 16]`, with `?` for what data decides."""
        if self.shape is None:
            return f"{self.dtype.name} of any shape"
        return f"{self.dtype.name} [{', '.join('?' if s is None else str(s) for s in self.shape)}]"

    def admits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of that shape can be fed."""
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            own is None or own == given for own, given in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True)
class Bundle:
    """A `model.par` folder: its path, mesh and ports by name, and output by input of the state pairs."""

    path: Path
    mesh: Mesh
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    states: Mapping[str, str]

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Bundle:
        """Reads `plan.json`. Errors: ModelError, naming the file and what is missing or wrong there."""
        folder = Path(path)
        plan = _read_plan(folder)
        try:
            mesh = Mesh.of((name, size) for name, size in plan["mesh"])
            inputs, outputs = (
                {p["name"]: _port(p) for p in plan[key]} for key in ("inputs", "outputs")
            )
            states = {pair["input"]: pair["output"] for pair in plan.get("states", [])}
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{folder / 'plan.json'}: {type(error).__name__}: {error}; "
                "write the folder again with `onnxpar shard`"
            ) from error
        unknown = (states.keys() - inputs.keys()) | (set(states.values()) - outputs.keys())
        if unknown:
            raise ModelError(f"{folder / 'plan.json'}: state pairs name no port: {sorted(unknown)}")
        return Bundle(folder, mesh, inputs, outputs, states)

    def rank_file(self, rank: int) -> Path:
        """The graph of a rank. Errors: ModelError where the folder lacks it."""
        file = self.path / f"rank_{rank:04d}.onnx"
        if not file.is_file():
            raise ModelError(
                f"{self.path} lacks {file.name}, though its plan has {self.mesh.size} ranks"
            )
        return file


def _read_plan(folder: Path) -> dict[str, Any]:
    file = folder / "plan.json"
    if not file.is_file():
        raise ModelError(f"{folder} is not a sharded model: it has no plan.json; see `onnxpar shard`")
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        found = plan.get("format") if isinstance(plan, dict) else None
        raise ModelError(f"{file} has format {found!r}, this onnxpar reads {FORMAT}: shard it anew")
    return plan


def _port(data: Mapping[str, Any]) -> Port:
    name, shape = data["name"], data.get("shape")
    dtype = data["dtype"]
    if dtype not in ELEMENTS:
        raise ModelError(f"{name!r}: onnxpar hands no {dtype} tensors over; it knows {[*ELEMENTS]}")
    layout = None if data.get("layout") is None else Layout.from_json(data["layout"])
    sizes = None if shape is None else tuple(s if isinstance(s, int) else None for s in shape)
    if layout is not None and (sizes is None or layout.shape != sizes):
        raise ModelError(f"{name!r}: its shape {shape} is not that of its layout, {layout.shape}")
    return Port(name, np.dtype(dtype), sizes, layout)
