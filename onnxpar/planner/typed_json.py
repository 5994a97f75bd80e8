"""Encodes values of the compiler as JSON, and back, for dumps. A type that JSON lacks becomes an
object with one key, the name of the type.

A tuple is `{"tuple": [...]}`, a dict with any keys `{"dict": [[key, value], ...]}`, a dataclass of
TYPES `{"Axis": {"name": "tp", ...}}`, a node with its factors `{"op": "MatMul_3"}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import numpy as np

from onnxpar.cost.topology import Topology
from onnxpar.graph.reshards import Reshard
from onnxpar.layout.mesh import Mesh
from onnxpar.search.behind_sums import SplitBehindSums
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.reshard_steps import ReshardStep
from onnxpar.sharding.state import FactorSharding
from onnxpar.strategy.context_parallel import SplitSequences
from onnxpar.strategy.expert_parallel import SplitExperts
from onnxpar.strategy.split_alone import CloseOpen, SplitAlone, SplitUpdate
from onnxpar.strategy.split_caches import SplitCaches
from onnxpar.strategy.strategy import NodeAnnotation, TensorAnnotation
from onnxpar.strategy.table_parallel import FeedWhole, HoldTable
from onnxpar.strategy.training_presets import Closed, SplitSums, SplitTogether


def _with_parts(kinds: Iterable[type[Any]]) -> dict[str, type[Any]]:
    """Returns these dataclasses and the dataclasses in the types of their fields, recursively, by
    name."""
    by_type_name: dict[str, type[Any]] = {}
    todo = list(kinds)
    while todo:
        kind = todo.pop()
        if kind.__name__ not in by_type_name and kind is not OpFactors and is_dataclass(kind):
            by_type_name[kind.__name__] = kind
            types = [t for hint in get_type_hints(kind).values() for t in (hint, *_arguments(hint))]
            todo += [t for t in types if isinstance(t, type)]
    return by_type_name


def _arguments(hint: Any) -> Iterator[Any]:
    """Yields the types inside a type such as `tuple[int, ...] | None`, at any depth."""
    for part in get_args(hint):
        yield part
        yield from _arguments(part)


TYPES = _with_parts(
    (
        CloseOpen,
        Closed,
        FactorSharding,
        FeedWhole,
        HoldTable,
        Mesh,
        NodeAnnotation,
        Reshard,
        ReshardStep,
        SplitAlone,
        SplitBehindSums,
        SplitCaches,
        SplitExperts,
        SplitSequences,
        SplitSums,
        SplitTogether,
        SplitUpdate,
        TensorAnnotation,
        Topology,
    )
)


def encode(value: Any) -> Any:
    """Returns the value as JSON value."""
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
    """Returns the value that `encode` encoded; nodes are looked up in `factors`. Errors:
    ValueError."""
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
