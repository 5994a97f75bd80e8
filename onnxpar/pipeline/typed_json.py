"""Encodes values of the compiler as JSON, and back; a type that JSON lacks is written as a tag.

A tuple is `{"tuple": [...]}`, a dict with any keys `{"dict": [[key, value], ...]}`, a dataclass of
TYPES `{"Axis": {"name": "tp", ...}}`, a node's factors `{"op": "MatMul_3"}`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from onnxpar.cost.device import Rate
from onnxpar.cost.topology import Device, Level, Link, Topology
from onnxpar.ir.reshards import Reshard
from onnxpar.layout.layout import Concat, Factor, Layout, Product
from onnxpar.layout.mesh import Axis, Mesh
from onnxpar.presets.context_parallel import SplitSequences
from onnxpar.presets.expert_parallel import SplitExperts
from onnxpar.presets.split_alone import CloseOpen, SplitAlone, SplitUpdate
from onnxpar.presets.split_caches import SplitCaches
from onnxpar.presets.table_parallel import FeedWhole, HoldTable
from onnxpar.presets.training_presets import Closed, SplitSums, SplitTogether
from onnxpar.reshard.steps import ReshardStep
from onnxpar.search.behind_sums import SplitBehindSums
from onnxpar.sharding.factors import GraphFactors, OpFactors
from onnxpar.sharding.state import FactorSharding
from onnxpar.strategy.strategy import NodeAnnotation, TensorAnnotation

TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Axis,
        CloseOpen,
        Closed,
        Concat,
        Device,
        Factor,
        FeedWhole,
        HoldTable,
        Layout,
        Level,
        Link,
        Mesh,
        NodeAnnotation,
        FactorSharding,
        Product,
        Rate,
        SplitAlone,
        SplitBehindSums,
        SplitCaches,
        SplitExperts,
        SplitSequences,
        SplitSums,
        SplitTogether,
        SplitUpdate,
        Reshard,
        ReshardStep,
        TensorAnnotation,
        Topology,
    )
}


def encode(value: Any) -> Any:
    """The value as plain JSON."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": [encode(item) for item in sorted(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, OpFactors):
        return {"op": value.node.name}
    name = type(value).__name__
    assert TYPES.get(name) is type(value), f"no JSON for a {type(value)}"
    return {name: {f.name: encode(getattr(value, f.name)) for f in fields(value)}}


def decode(value: Any, factors: GraphFactors) -> Any:
    """Decodes a value that `encode` made; nodes are looked up in `factors`. Errors: ValueError."""
    if isinstance(value, list):
        return [decode(item, factors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"not a value of a dump: {str(value)[:60]}")
    ((kind, inner),) = value.items()
    try:
        if kind == "op":
            return factors.op(inner)
        if kind == "dict":
            return {decode(k, factors): decode(v, factors) for k, v in inner}
        if kind in ("tuple", "set"):
            items = [decode(item, factors) for item in inner]
            return tuple(items) if kind == "tuple" else set(items)
        return TYPES[kind](**{name: decode(item, factors) for name, item in inner.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a valid {kind}: {error}") from None
