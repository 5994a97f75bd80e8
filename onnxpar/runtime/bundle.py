"""What the runtime reads of a `model.par` folder: its mesh, ports and state pairs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.errors import ModelError
from onnxpar.layout import Layout
from onnxpar.mesh import Mesh
from onnxpar.runtime.tensors import ELEMENTS, tensor_type

FORMAT = 1
"""The only format of plan.json that this runtime reads."""

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class NodeArg:
    """A graph input or output as `onnxruntime.NodeArg` has it; `shape` is the global one."""

    name: str
    type: str
    shape: list[int | None]


@dataclass(frozen=True)
class Port:
    """A graph input or output. What data decides is None: a size, shape or layout."""

    name: str
    dtype: np.dtype[Any]
    shape: Shape | None
    layout: Layout | None

    @property
    def arg(self) -> NodeArg:
        """As onnxruntime would describe it."""
        return NodeArg(self.name, tensor_type(self.dtype), list(self.shape or ()))

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
    """A `model.par` folder: its mesh, ports by name, and state outputs by input."""

    path: Path
    mesh: Mesh
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    states: Mapping[str, str]

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Bundle:
        """Reads `plan.json`. Errors: ModelError, naming the file and what is wrong there."""
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

    def check_complete(self) -> None:
        """Errors: ModelError where the folder lacks the graph of any rank."""
        for rank in range(self.mesh.size):
            self.rank_file(rank)

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
        raise ModelError(
            f"{folder} is not a sharded model: it has no plan.json; see `onnxpar shard`"
        )
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
