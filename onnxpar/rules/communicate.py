"""Building blocks of lowerings that communicate inside an op: sums, means, positions.

16-bit floats are summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, dtype_of
from onnxpar.rules.rule import Local, Lowering

UNKNOWN = "a data-dependent size"
FLOAT = onnx.TensorProto.FLOAT
_SHORT = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}


def communicating(
    node: gs.Node,
    factors: Sequence[str],
    sizes: Sequence[Size],
    lower: Callable[[Lowering], None],
) -> dict[str, Any]:
    """Returns the fields of a `Rule` that allow to split these factors although the op needs their
    whole dimensions: `lower` replaces the node by nodes that communicate. If any of `sizes`, the
    global sizes of the factors, is unknown, the fields keep all of the factors whole instead."""
    if None in sizes:
        return {"whole": dict.fromkeys(factors, UNKNOWN)}
    over = frozenset(factors)
    return {"communicating": over, "lowered": over, "lower": lower}


def is_short_float(tensor: gs.Tensor) -> int:
    """ONNX's number of the tensor's element type if it is a 16-bit float type, else 0."""
    return _SHORT.get(str(dtype_of(tensor)), 0)


def widen(build: Lowering, x: gs.Tensor) -> gs.Tensor:
    """A tensor of 16-bit floats cast to float32; any other tensor unchanged."""
    return build.add("Cast", [x], to=FLOAT) if is_short_float(x) else x


def like(x: gs.Tensor, value: Any) -> np.ndarray[Any, Any]:
    """`value` as a NumPy constant of the element type of `x`."""
    return np.array(value, dtype_of(x))


def has_output(build: Lowering, output: int) -> bool:
    """True if the node has result `output`, which may be optional."""
    outputs = build.local.node.outputs
    return output < len(outputs) and bool(outputs[output].name)


def finish(build: Lowering, op: str, inputs: Sequence[Any], output: int = 0, **attrs: Any) -> None:
    """Makes result `output` of the node by `op`; adds a Cast if the result has another type than
    `inputs[0]`, as after `widen`."""
    dtype = dtype_of(build.local.node.outputs[output])
    if dtype == dtype_of(inputs[0]):
        build.finish(op, inputs, output, **attrs)
        return
    x = inputs[0] if op == "Identity" else build.add(op, inputs, **attrs)
    build.finish("Cast", [x], output, to=onnx.helper.np_dtype_to_tensor_dtype(dtype))


def finish_chain(build: Lowering, x: gs.Tensor, steps: Sequence[tuple[str, Any]]) -> None:
    """Makes result 0 of the node from `x` by a chain of binary ops: [("Mul", scale), ("Add", bias)]
    gives x * scale + bias."""
    for op, operand in steps[:-1]:
        x = build.add(op, [x, operand])
    finish(build, steps[-1][0], [x, steps[-1][1]])


def total(build: Lowering, x: gs.Tensor, axes: Sequence[int], factors: Sequence[str]) -> gs.Tensor:
    """Returns the global sum of `x` over `axes`: of the rank's shard, then all-reduced over the
    ranks that hold other shards of `factors`, the factors of these dimensions. The axes keep size
    1."""
    return build.all_reduce(build.add("ReduceSum", [x], axes=[*axes], keepdims=1), factors)


def mean(
    build: Lowering,
    x: gs.Tensor,
    axes: Sequence[int],
    factors: Sequence[str],
    sizes: Sequence[Size],
) -> gs.Tensor:
    """Returns the global mean of `x` over `axes`, as `total` the sum; `sizes` are the global sizes
    of these dimensions."""
    count = number(build, math.prod(s or 0 for s in sizes), dtype_of(x))
    return build.add("Div", [total(build, x, axes, factors), count])


def where_held(build: Lowering, x: gs.Tensor, factor: str) -> gs.Tensor:
    """Returns `x`; on ranks with an empty shard of the factor, zeros in its place, because some
    kernels do not return zero for a sum over nothing."""
    if not build.local.may_be_empty(factor):
        return x
    size = build.per_rank(lambda local: np.array(local.size(factor), np.int64))
    return build.add("Where", [build.add("Equal", [size, np.array(0, np.int64)]), like(x, 0), x])


def number(build: Lowering, size: int | Callable[[Local], int], dtype: Any) -> gs.Tensor:
    """Returns a size, or a size that depends on the rank, as a scalar of type `dtype`. It is the
    Cast of an int64 constant, because only int64 constants may depend on sizes that are open until
    a run."""

    def whole(local: Local) -> Any:
        return np.array(size(local) if callable(size) else size, np.int64)

    to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return build.add("Cast", [build.per_rank(whole)], to=to)


def moments(
    build: Lowering,
    x: gs.Tensor,
    axes: Sequence[int],
    factors: Sequence[str],
    sizes: Sequence[Size],
) -> tuple[gs.Tensor, gs.Tensor, gs.Tensor]:
    """Returns (mean, x - mean, variance) over `axes`, across all shards. The variance is a
    population's (not divided by n - 1), computed in a second pass. `factors` and `sizes` are the
    factors and global sizes of the dimensions `axes`."""
    middle = mean(build, x, axes, factors, sizes)
    centred = build.add("Sub", [x, middle])
    squares = build.add("Mul", [centred, centred])
    return middle, centred, mean(build, squares, axes, factors, sizes)


def inverse_root(build: Lowering, variance: gs.Tensor, epsilon: float) -> gs.Tensor:
    """1 / sqrt(variance + epsilon)."""
    shifted = build.add("Add", [variance, like(variance, np.float32(epsilon))])
    return build.add("Reciprocal", [build.add("Sqrt", [shifted])])


def global_positions(build: Lowering, index: gs.Tensor, factor: str) -> gs.Tensor:
    """Turns int64 positions in the rank's shard of a factor into positions in the global dimension:
    if the rank holds [4, 6), 1 becomes 5."""
    if not build.local.is_split(factor):
        return index
    if build.local.is_run(factor):

        def start(local: Local) -> Any:
            return np.array(local.interval(factor)[0], np.int64)

        return build.add("Add", [index, build.per_rank(start)])

    def held(local: Local) -> Any:
        positions = local.positions(factor).astype(np.int64)
        return (
            positions if len(positions) else np.zeros(1, np.int64)
        )  # a stand-in needs a position, too

    return build.add("Gather", [build.per_rank(held), index], axis=0)


def local_places(local: Local, factor: str, size: int) -> np.ndarray[Any, Any]:
    """Returns for each global position of a factor its position in the rank's shard, or -1 if
    another rank holds it: a rank with [2, 4) of 5 gets [-1, -1, 0, 1, -1]."""
    held = local.positions(factor)
    table = np.full(size, -1, np.int64)
    table[held] = np.arange(len(held))
    return table


def held_positions(build: Lowering, factor: str, axis: int = 0, rank: int = 1) -> gs.Tensor:
    """Returns the global positions (int64) of the rank's shard of a factor, e.g. [4, 5, 6, 7] on
    rank 1 of 2. They lie along dimension `axis` of a tensor with `rank` dimensions; all others have
    size 1.

    For a contiguous shard, the result is a Range, so that the factor's size may be open.
    """
    if build.local.is_run(factor):

        def bound(end: int) -> gs.Tensor:
            return build.per_rank(lambda local: np.array(local.interval(factor)[end], np.int64))

        held: gs.Tensor = build.add("Range", [bound(0), bound(1), np.array(1, np.int64)])
    else:
        held = build.per_rank(lambda local: local.positions(factor).astype(np.int64))
    others = [i for i in range(rank) if i != axis]
    return build.add("Unsqueeze", [held], axes=others) if others else held


def own_shard(build: Lowering, x: gs.Tensor, dims: Sequence[str]) -> gs.Tensor:
    """Returns the rank's shard of a tensor `x` that each rank has whole; `dims` names the factor of
    each dimension."""
    for axis, factor in enumerate(dims):
        if build.local.is_split(factor):
            x = build.add("Gather", [x, held_positions(build, factor)], axis=axis)
    return x
