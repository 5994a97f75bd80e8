"""Cases whose inputs have open sizes: fed what their author feeds, at other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto
from peer.cases import Feeds, PeerCase, run_session, unsplit_session
from peer.forms import forms

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 100)
MOST = 1 << 18
"""Most elements of the inputs at another size, so that a case takes seconds."""
SYMBOL = "N"
Places = tuple[tuple[str, int], ...]
"""Dimensions of inputs that are N."""


def opened(case: PeerCase, sample: tuple[int, int] = (0, 1)) -> Iterator[PeerCase]:
    """The case in each of its forms, with all dimensions of a size, then with each of them, made
    open; fed at its own size, and at others at which the unsplit runtime takes it, if any. Of
    these, `sample` (I, N) takes every N-th from the I-th, and at least one."""
    ways = []
    for form in forms(case):
        feeds = form.data[0][0]
        if len(form.data) == 1 and not _is_random(form.model):
            tensors = [p.name for p in form.model.graph.input if p.type.HasField("tensor_type")]
            given = {name: feeds[name] for name in tensors if name in feeds}
            ways += [(form, feeds, places) for places in _groups(given)]
    first, step = sample
    step = min(step, max(len(ways), 1))
    for form, feeds, places in ways[first % step :: step]:
        found = _at_other_sizes(form, feeds, places)
        if found:
            yield found


def _is_random(model: ModelProto) -> bool:
    """Whether runs of the model differ, or their results depend on an order that is not specified:
    positions that are given again from the first on name elements twice."""
    ops = {node.op_type for node in _nodes(model)}
    drawn = ("Bernoulli", "Multinomial", "Dropout")
    return any("Random" in op or op in (*drawn, "MaxUnpool") for op in ops)


def _nodes(model: ModelProto) -> Iterator[NodeProto]:
    yield from model.graph.node
    for function in model.functions:
        yield from function.node


def _groups(feeds: Feeds) -> Iterator[Places]:
    by_size: dict[int, list[tuple[str, int]]] = {}
    for name, value in feeds.items():
        for axis, size in enumerate(value.shape):
            if size:
                by_size.setdefault(size, []).append((name, axis))
    for places in by_size.values():
        yield tuple(places)
        if len(places) > 1:
            yield from (((place),) for place in places)


def _at_other_sizes(case: PeerCase, feeds: Feeds, places: Places) -> PeerCase | None:
    """A session for each size: where a kernel does not look, the inference of shapes does. None
    where fewer than two other sizes run, or the unsplit runtime does not load the open model."""
    data, (name, axis), model = [], places[0], _with_sizes(case.model, places, SYMBOL)
    try:
        unsplit_session(model)
    except Exception:  # such as a body that depends on this size
        return None
    for size in (feeds[name].shape[axis], *SIZES):
        fed = _resized(feeds, places, size)
        if data and sum(map(_elements, fed.values())) > MOST:
            continue
        try:
            session = unsplit_session(_with_sizes(case.model, places, size))
            results = run_session(session, fed)
            if not data or _writes_all(session, fed, results):
                data.append((fed, results))
        except Exception:  # the op does not allow this size
            if not data:
                return None
    where = ", ".join(f"{name}.{axis}" for name, axis in places)
    name = f"{case.name} with open {where}"
    return replace(case, name=name, model=model, data=data) if len(data) > 2 else None


def _elements(value: Any) -> int:
    """The number of elements of a tensor, or of those of a sequence."""
    return sum(map(_elements, value)) if isinstance(value, list) else int(np.size(value))


def _writes_all(session: ort.InferenceSession, feeds: Feeds, results: Sequence[Any]) -> bool:
    """Whether kernels write each element of the results: one that is left as it was is no result
    (RotaryEmbedding of 9 elements)."""
    values = [*feeds.values(), *results]
    if not all(isinstance(v, np.ndarray) and v.dtype.kind in "fiub" for v in values):
        return True
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(value))
    places = [np.ones_like(result) for result in results]
    for port, place in zip(session.get_outputs(), places, strict=True):
        at = place.ctypes.data
        binding.bind_output(port.name, "cpu", 0, place.dtype, place.shape, at)
    session.run_with_iobinding(binding)
    return not any(((p == 1) & (r != 1)).any() for p, r in zip(places, results, strict=True))


def _with_sizes(model: ModelProto, places: Places, size: int | str) -> ModelProto:
    """The model with this size or symbol as these dimensions, and outputs of any shape."""
    found = ModelProto()
    found.CopyFrom(model)
    for port in found.graph.input:
        for name, axis in places:
            if name == port.name:
                dim = port.type.tensor_type.shape.dim[axis]
                if isinstance(size, str):
                    dim.dim_param = size
                else:
                    dim.dim_value = size
    for port in found.graph.output:
        _forget_shape(port.type)
    del found.graph.value_info[:]
    return found


def _forget_shape(type_: onnx.TypeProto) -> None:
    if type_.HasField("tensor_type"):
        type_.tensor_type.ClearField("shape")
    elif type_.HasField("sequence_type"):
        _forget_shape(type_.sequence_type.elem_type)
    elif type_.HasField("optional_type"):
        _forget_shape(type_.optional_type.elem_type)


def _resized(feeds: Feeds, places: Places, size: int) -> Mapping[str, Any]:
    """Values cut off, or again from the first on, along these dimensions."""
    fed = dict(feeds)
    for name, axis in places:
        fed[name] = np.take(fed[name], np.arange(size) % fed[name].shape[axis], axis)
    return fed
