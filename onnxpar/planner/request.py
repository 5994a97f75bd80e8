"""The options with which a training step was sharded, as plan.json keeps them: with these, onnxpar
can shard the step again for another number of ranks."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxpar.base.digests import digests_of
from onnxpar.base.errors import InputError, ModelError
from onnxpar.base.plain_yaml import parse, read_text
from onnxpar.base.unreadable import cannot_read
from onnxpar.base.write_file import unread
from onnxpar.cost.machines import is_machine
from onnxpar.graph.stored import external_location, stored_tensors
from onnxpar.layout.mesh import Mesh
from onnxpar.load.read_file import read_proto

_NOT_KEPT = ("check_layouts", "typical", "page_size", "kv_dtype")
"""Options that do not affect a training step, because its sizes are fixed."""
_IN_FILES = ("strategy", "topology")
"""Options whose value is a file, or the content of such a file."""
_MOST_MESHES = 4
"""Most meshes to try for a number of ranks."""

Request = Mapping[str, Any]
"""Options of `shard` by name, as JSON values."""


def request_of(user_options: Mapping[str, Any]) -> Request | None:
    """Returns the user's options, sorted by name, with the contents of files in place of their
    paths. None if some value has no form in JSON. The files must be valid. Errors: InputError for a
    file that cannot be read."""
    request: dict[str, Any] = {}
    for name, value in sorted(user_options.items()):
        if value is None or name in _NOT_KEPT:
            continue
        is_file = isinstance(value, (str, os.PathLike)) and not is_machine(value)
        if name in _IN_FILES and is_file:
            try:
                value = parse(read_text(value))
            except OSError as error:
                raise InputError(cannot_read(value, error)) from None
        if name == "strategy" and isinstance(value, Mapping):
            value = {key: entry for key, entry in value.items() if key != "context"}
        try:
            request[name] = _plain(value)
        except TypeError:
            return None
    return request


def _plain(value: Any) -> Any:
    """Returns a value as JSON value. Errors: TypeError if it has none."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mesh):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(entry) for entry in value]
    raise TypeError(type(value).__name__)


def requests_for(request: Request, mesh: Mesh, ranks: int) -> Iterator[dict[str, Any]]:
    """Yields options to shard a step again over another number of ranks, after it was sharded over
    `mesh` with `request`; the most similar ones first. If the user has named axes, these are over
    meshes with the same axes."""
    strategy = request.get("strategy") or {}
    rest = {name: value for name, value in request.items() if name not in ("devices", "mesh")}
    if "strategy" in request:
        rest["strategy"] = {key: entry for key, entry in strategy.items() if key != "mesh"}
    if "mesh" in request or "mesh" in strategy or (len(mesh.shape) > 1 and "preset" in request):
        for similar in _alike(mesh, ranks)[:_MOST_MESHES]:
            yield {**rest, "mesh": str(similar)}
    else:
        yield {**rest, "devices": ranks}


def _alike(mesh: Mesh, ranks: int) -> list[Mesh]:
    """Returns meshes of this many ranks with the same axes in other sizes: first meshes whose inner
    axes keep their sizes, then meshes with larger inner axes, because the inner axes divide the
    memory of a rank."""
    names = [name for name, _ in mesh.shape]
    before = [size for _, size in mesh.shape]

    def change(sizes: Sequence[int]) -> list[tuple[bool, float]]:
        pairs = list(zip(sizes, before, strict=True))[1:]
        return [(new < old, abs(math.log(new / old))) for new, old in reversed(pairs)]

    ordered = sorted(_factors(ranks, len(names)), key=change)
    return [Mesh.of(zip(names, sizes, strict=True)) for sizes in ordered]


def _factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields all tuples of `count` positive integers whose product is `product`."""
    if count == 1:
        yield (product,)
        return
    for first in (n for n in range(1, product + 1) if product % n == 0):
        for rest in _factors(product // first, count - 1):
            yield (first, *rest)


def model_digest(path: Path) -> str:
    """Returns a digest of a model's file and of all files with its weights. Errors: ModelError if
    one cannot be read."""
    tensors = stored_tensors(read_proto(path).graph)
    names = {external_location(t)[0] for t in tensors if t.data_location == t.EXTERNAL}
    try:
        of_model = digests_of([path])[path.name]
        of_weights = {name: digests_of([path.parent / name]) for name in sorted(names)}
    except OSError as error:
        raise ModelError(f"cannot read {path}: {unread(error)}") from None
    return hashlib.sha256(json.dumps([of_model, of_weights]).encode()).hexdigest()
