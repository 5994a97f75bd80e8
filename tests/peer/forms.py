"""The forms in which a case is tried: as it is, and with its parameters as constants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper
from peer.cases import PeerCase


def forms(case: PeerCase) -> Iterator[PeerCase]:
    """The case with everything fed; then, where some operand is a parameter (axes, a shape,
    repeats, pads), the case with those as constants, as they are in models that people export."""
    yield case
    constant = _parameters(case)
    if constant:
        yield _with_constants(case, constant)


def _parameters(case: PeerCase) -> list[str]:
    """Inputs that are nothing but parameters to all that read them."""
    feeds = case.data[0][0]
    if len(case.data) > 1:
        return []
    roles: dict[str, list[bool]] = {}
    for node in case.model.graph.node:
        for i, name in enumerate(node.input):
            if name in feeds:
                roles.setdefault(name, []).append(_is_parameter(node, i, case))
    return [
        name
        for name, found in roles.items()
        if all(found) and isinstance(feeds[name], np.ndarray) and feeds[name].ndim <= 1
    ]


def _is_parameter(node: NodeProto, index: int, case: PeerCase) -> bool:
    """Whether the op's definition takes this operand in one type of its own, or as indices."""
    opset = next((o.version for o in case.model.opset_import if o.domain == node.domain), 1)
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return False
    if index == 0 and len(node.input) > 1:
        return False
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]
    own_type = formal.type_str.startswith("tensor(") and not schema.inputs[0].type_str.startswith(
        "tensor("
    )
    return own_type or formal.type_str in ("Tind", "tensor(int64)")


def _with_constants(case: PeerCase, names: list[str]) -> PeerCase:
    feeds, expected = case.data[0]
    model = ModelProto()
    model.CopyFrom(case.model)
    kept = [i for i in model.graph.input if i.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(numpy_helper.from_array(feeds[n], n) for n in names)
    fed = {name: value for name, value in feeds.items() if name not in names}
    return replace(case, name=f"{case.name} with constants", model=model, data=[(fed, expected)])
