"""Reads ports.json: what each rank holds of the inputs and outputs of rank files that others made.

docs/how-to/verify.md describes the file. It becomes a plan of the form that plan.json has, in which
a dimension may have the positions of each rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError, ModelError
from onnxpar.base.read_bounded import read_bounded
from onnxpar.equivalence.layouts import MOST_POSITIONS
from onnxpar.equivalence.program import Shape, load, read_program
from onnxpar.equivalence.stored import WeightFiles

PORTS = "ports.json"
_KEYS = {"mesh", "inputs", "outputs", "states", "sizes", "files", "ranges"}
_Ports = Mapping[str, Mapping[str, Any]]
_Shapes = Mapping[str, Shape | None]


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads an object of JSON. Errors: ModelError."""
    try:
        found = json.loads(read_bounded(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error!s:.80}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not an object")
    return found


def plan_of(path: Path, model: Path, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The plan that ports.json says; shapes are the model's, with these values of open sizes.
    Errors: InputError if the file says something else than ports; ModelError if a file cannot be
    read."""
    found = read_json(path)
    try:
        return _plan(found, model, sizes)
    except _Wrong as error:
        raise InputError(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{model} is not a valid model: {error}") from None


class _Wrong(Exception):
    """What is wrong with the file."""


def _plan(found: Mapping[str, Any], model: Path, sizes: Mapping[str, int]) -> dict[str, Any]:
    unknown = sorted(found.keys() - _KEYS)
    if unknown:
        raise _Wrong(f"no key is named {unknown[0]!r}; there are {', '.join(sorted(_KEYS))}")
    mesh = _sizes(found, "mesh", 1)
    if not mesh:
        raise _Wrong('give the mesh: {"mesh": {"tp": 2}} has two ranks along one axis')
    *shapes, example = _shapes(model, _sizes(found, "sizes", 0) | dict(sizes))
    plan: dict[str, Any] = {"mesh": [*mesh.items()], "example": example}
    for key, known in zip(("inputs", "outputs"), shapes, strict=True):
        ports = _ports(found, key)
        for name in ports:
            if name not in known:
                raise _Wrong(f"{model} has no {key[:-1]} {name!r}")
        plan[key] = [_port(name, known[name], ports.get(name, {}), mesh) for name in known]
    plan["ranges"] = _ranges(found, shapes[0])
    plan["states"] = [_pair(pair) for pair in _list(found, "states")]
    plan["rank_files"] = [_file(name) for name in _list(found, "files")]
    ranks = math.prod(mesh.values())
    if plan["rank_files"] and len(plan["rank_files"]) != ranks:
        raise _Wrong(f"files has {len(plan['rank_files'])} names; the mesh has {ranks} ranks")
    return plan


def _list(found: Mapping[str, Any], key: str) -> list[Any]:
    value = found.get(key, [])
    if not isinstance(value, list):
        raise _Wrong(f"{key} is not a list")
    return value


def _sizes(found: Mapping[str, Any], key: str, least: int) -> dict[str, int]:
    """Names with whole numbers."""
    value = found.get(key, {})
    if not isinstance(value, dict):
        raise _Wrong(f"{key} is not an object")
    for name, size in value.items():
        if type(size) is not int or not least <= size < MOST_POSITIONS:
            raise _Wrong(f"{key} has {name!r}: {size!r:.40}; give a whole number from {least} on")
    return value


def _ports(found: Mapping[str, Any], key: str) -> _Ports:
    ports = found.get(key, {})
    if not isinstance(ports, dict) or not all(isinstance(port, dict) for port in ports.values()):
        raise _Wrong(f'{key} is not of the form {{"x": {{"0": "tp"}}}}: name, dimension, division')
    return ports


def _ranges(found: Mapping[str, Any], inputs: _Shapes) -> dict[str, tuple[int, int]]:
    """The integers that inputs may hold: [low, high)."""
    given, ranges = found.get("ranges", {}), {}
    for name, each in given.items() if isinstance(given, dict) else [("", given)]:
        low, high = each if isinstance(each, list) and len(each) == 2 else (None, None)
        if name not in inputs or type(low) is not int or type(high) is not int or low >= high:
            raise _Wrong(
                f'ranges has {name!r}: {each!r:.40}; give {{"ids": [0, 32000]}} for inputs'
            )
        ranges[name] = low, high
    return ranges


def _pair(pair: object) -> dict[str, str]:
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(n, str) for n in pair):
        raise _Wrong(f'states has {pair!r:.40}; give pairs: ["input", "output"]')
    return dict(zip(("input", "output"), pair, strict=True))


def _file(name: object) -> str:
    if not isinstance(name, str) or not name or "\0" in name:
        raise _Wrong(f"files has {name!r:.40}; give the name of a file for each rank")
    return name


def _shapes(model: Path, sizes: Mapping[str, int]) -> tuple[_Shapes, _Shapes, dict[str, int]]:
    """The shapes of the model's inputs and outputs, None if unknown; and the open sizes."""
    graph = load(model).graph
    stored = {tensor.name for tensor in graph.initializer}
    fed = [port for port in graph.input if port.name not in stored]
    params = {d.dim_param for port in fed for d in port.type.tensor_type.shape.dim} - {""}
    open_sizes = {name: sizes[name] for name in sorted(params & sizes.keys())}
    inputs = {port.name: _shape(port, sizes) for port in fed}
    known = {name: shape for name, shape in inputs.items() if shape is not None}
    program = read_program(model, WeightFiles(), inputs.keys(), known if open_sizes else None)
    return inputs, {name: program.shapes.get(name) for name in program.outputs}, open_sizes


def _shape(port: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> Shape | None:
    """The shape of an input; None if a size is not known."""
    tensor = port.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    found = []
    for dim in tensor.shape.dim:
        if dim.dim_param and dim.dim_param not in sizes:
            raise _Wrong(
                f"input {port.name!r} has the open size {dim.dim_param!r}; "
                f'give its value: {{"sizes": {{"{dim.dim_param}": 4}}}}'
            )
        found.append(sizes[dim.dim_param] if dim.dim_param else dim.dim_value)
    return tuple(found)


def _port(
    name: str, shape: Shape | None, divisions: Mapping[str, Any], mesh: Mapping[str, int]
) -> dict[str, Any]:
    """A port of a plan; `divisions` has dimensions that are not whole on each rank."""
    if shape is None:
        if divisions:
            raise _Wrong(f"{name!r} has no known shape, so it cannot be divided")
        return {"name": name, "shape": None, "layout": None}
    dims: list[dict[str, Any]] = [{"size": size} for size in shape]
    for text, division in divisions.items():
        axis = int(text) if re.fullmatch(r"-?\d{1,3}", text) else len(shape)
        if not -len(shape) <= axis < len(shape):
            raise _Wrong(f"{name!r} has no dimension {text!r:.20}; it has {len(shape)} dimensions")
        dims[axis] = _division(name, shape[axis], division, mesh)
    return {"name": name, "shape": list(shape), "layout": {"dims": dims}}


def _division(name: str, size: int, division: object, mesh: Mapping[str, int]) -> dict[str, Any]:
    """A dimension of a layout: equal parts over axes of the mesh, or the ranges of each rank."""
    axes = [division] if isinstance(division, str) else division
    if not isinstance(axes, list) or not axes:
        raise _Wrong(f"{name!r} is divided by {division!r:.40}; give an axis, or ranges")
    if all(isinstance(axis, str) for axis in axes):
        for axis in axes:
            if axis not in mesh:
                raise _Wrong(f"{name!r} is divided over {axis!r}; the mesh has {', '.join(mesh)}")
        if len({*axes}) != len(axes):
            raise _Wrong(f"{name!r} is divided over an axis twice")
        if size % math.prod(mesh[axis] for axis in axes):
            raise _Wrong(
                f"{name!r} has {size} positions, which {division} cannot divide into equal parts; "
                "give ranges"
            )
        return {"size": size, "axes": [[axis, mesh[axis]] for axis in axes]}
    ranks = math.prod(mesh.values())
    if len(axes) != ranks:
        raise _Wrong(f"{name!r} has the ranges of {len(axes)} ranks; the mesh has {ranks}")
    return {"size": size, "positions": tuple(_positions(name, size, each) for each in axes)}


def _positions(name: str, size: int, ranges: object) -> Array:
    """The positions of one rank: [start, end], or a list of these."""
    if isinstance(ranges, list) and ranges and not isinstance(ranges[0], list):
        ranges = [ranges]
    pieces = [np.zeros(0, np.int64)]
    for each in ranges if isinstance(ranges, list) else [ranges]:
        start, end = each if isinstance(each, list) and len(each) == 2 else (None, None)
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= size:
            raise _Wrong(
                f"{name!r} has the range {each!r:.40}; give [start, end] within 0 to {size}"
            )
        pieces.append(np.arange(start, end))
    held = np.concatenate(pieces)
    if len(held) > size:
        raise _Wrong(f"a rank holds positions of {name!r} twice")
    return held
