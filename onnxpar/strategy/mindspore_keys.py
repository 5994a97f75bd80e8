"""Reads MindSpore's attributes of operators and parameters, as keys of an entry of a strategy's
`shard`.

table: {manual_split: [20000, 10000], primitive_target: CPU}
w1: {in_strategy: [[4, 1], [1, 2]], comm_fusion: 2}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.base.near_names import there_are
from onnxpar.layout.mesh import Mesh
from onnxpar.sharding.factors import OpFactors

IN_STRATEGY, MANUAL_SPLIT, COMM_FUSION = "in_strategy", "manual_split", "comm_fusion"
PRIMITIVE_TARGET = "primitive_target"
_HOSTS = ("CPU", "host")


def _check_split(value: Any) -> None:
    """Checks the number of rows of each part of a table. Errors: StrategyError."""
    _sizes(value)


def _check_target(value: Any) -> None:
    """Checks the place of a table: CPU or host. Errors: StrategyError."""
    if value not in _HOSTS:
        raise StrategyError(
            f"give {' or '.join(_HOSTS)} for a table in files of the host, or leave it out for a "
            "table in the memory of its rank: ranks run on CPUs"
        )


def _check_fusion(value: Any) -> None:
    """Checks the number of a bucket of gradients. Errors: StrategyError."""
    if type(value) is not int or value < 0:
        raise StrategyError(
            "give the number of a bucket from 1, or 0 for a gradient that is reduced by itself"
        )


def _check_recompute(value: Any) -> None:
    """Refuses a request to recompute, which belongs to the training step. Errors: StrategyError."""
    if value is not False:
        raise StrategyError(
            "the training step decides what is recomputed: give `onnxpar grad --recompute-nodes "
            "GLOB`, and leave this out"
        )


def _check_nothing(value: Any) -> None:
    """Accepts any value: another function checks the entry without these keys."""


KEYS: Mapping[str, Callable[[Any], None]] = {
    IN_STRATEGY: _check_nothing,
    MANUAL_SPLIT: _check_split,
    PRIMITIVE_TARGET: _check_target,
    COMM_FUSION: _check_fusion,
    "recompute": _check_recompute,
}
"""The keys, each with a function that raises StrategyError for a value that onnxpar cannot
follow."""


def has_keys(entry: Any) -> bool:
    """True if an entry of `shard` has one of MindSpore's keys."""
    return isinstance(entry, Mapping) and not KEYS.keys().isdisjoint(entry)


def axes_in(entry: Mapping[str, Any]) -> list[Any]:
    """Returns the parts of an entry that may name mesh axes."""
    return [value for key, value in entry.items() if key == IN_STRATEGY or key not in KEYS]


def plain_entry(op: OpFactors, entry: Mapping[str, Any], mesh: Mesh, what: str) -> Any:
    """Returns an entry of the node `op` without MindSpore's keys: a list with an item for each
    input, or a mapping of factors. Errors: StrategyError that names the node (`what`) and the
    key."""
    for key, value in entry.items():
        if key in KEYS:
            try:
                KEYS[key](value)
            except StrategyError as error:
                raise StrategyError(f"{what}: {key}={value!r}: {error}") from None
    rest = {key: value for key, value in entry.items() if key not in KEYS}
    kinds = [k for k in (IN_STRATEGY, MANUAL_SPLIT) if k in entry]
    if len(kinds) + bool(rest) > 1:
        keys = " and ".join([*kinds, *map(str, rest)])
        raise StrategyError(f"{what}: {keys} split the same node; give one of them")
    if IN_STRATEGY in entry:
        return entry[IN_STRATEGY]
    if MANUAL_SPLIT in entry:
        return _split_by_hand(op, _sizes(entry[MANUAL_SPLIT]), mesh, what)
    return rest


def _sizes(value: Any) -> list[int]:
    """Returns the number of rows of each part of a table, from numbers of rows [20000, 10000], or
    from pairs of a number of rows and the first row [[20000, 0], [10000, 20000]]. Errors:
    StrategyError."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    pairs = [[item] if type(item) is int else item for item in value] if is_list else [[]]
    if not all(isinstance(p, Sequence) and len(p) in (1, 2) and _are_sizes(p) for p in pairs):
        raise StrategyError("give the number of rows of each part, such as [20000, 10000]")
    sizes = [pair[0] for pair in pairs]
    starts = [0, *accumulate(sizes)]
    if any(len(p) == 2 and p[1] != start for p, start in zip(pairs, starts, strict=False)):
        raise StrategyError(
            "the second number of each pair must be the first row of the part: ids count rows of "
            f"the whole table, so write {[[n, s] for n, s in zip(sizes, starts, strict=False)]}"
        )
    return sizes


def _are_sizes(pair: Sequence[Any]) -> bool:
    return all(type(n) is int and n >= 0 for n in pair)


def _split_by_hand(op: OpFactors, sizes: list[int], mesh: Mesh, what: str) -> list[Any]:
    """Returns an entry that splits the rows of a Gather's table into parts of these sizes, over the
    first axis of the mesh that has as many ranks as there are sizes. Errors: StrategyError."""
    if op.node.op != "Gather":
        raise StrategyError(
            f"{what}: {MANUAL_SPLIT} is for a Gather, whose first input is the table; for another "
            "node, give {axis: [sizes]} as one of its dimensions"
        )
    axis = next((name for name, size in mesh.shape if size == len(sizes)), None)
    if axis is None:
        raise StrategyError(
            f"{what}: {MANUAL_SPLIT} has {len(sizes)} parts, but no axis of the mesh {mesh} has "
            f"{len(sizes)} ranks; give another number of parts, or another mesh"
        )
    rank = len(op.node.inputs[0].shape)
    dims: list[Any] = [None] * rank
    dims[op.node.attrs.get("axis", 0) % rank] = {axis: sizes}
    return [dims, None]


def fusion_buckets(shard: Mapping[str, Any], parameters: Sequence[str]) -> dict[str, int]:
    """Returns the bucket of each parameter that has `comm_fusion` in an entry of `shard`: gradients
    in one bucket are reduced together. Of several entries, the last one counts. Errors:
    StrategyError if an entry with this key matches no parameter."""
    buckets: dict[str, int] = {}
    for pattern, entry in shard.items():
        if not isinstance(entry, Mapping) or COMM_FUSION not in entry:
            continue
        names = [n for n in parameters if n == pattern or fnmatchcase(n, str(pattern))]
        if not names:
            known = there_are(str(pattern), parameters) if parameters else "; the model is none"
            raise StrategyError(
                f"{pattern!r}: {COMM_FUSION} is for parameters of a training step{known}"
            )
        bucket: int = entry[COMM_FUSION]
        buckets.update(dict.fromkeys(names, bucket))
    return buckets
