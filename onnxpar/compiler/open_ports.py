"""Gives the inputs and outputs of a plan their open sizes, as formulas that are right at every
binding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.pass_ import PassContext
from onnxpar.compiler.plan import OpenPort, Plan, Port
from onnxpar.graph.open_sizes import OpenSizes
from onnxpar.layout.layout import dim_axes, leaves
from onnxpar.layout.symbols import Polynomial


def open_ports(plan: Plan, ctx: PassContext) -> None:
    """Replaces sizes in the plan's inputs and outputs by formulas of symbols (`past + 1`) where the
    model's sizes are open; adds an example, and limits of the symbols. Errors: StrategyError for a
    size that is not a polynomial of the symbols, or for a symbol that no input has as a size."""
    sizes = ctx.model.sizes
    if sizes is None:
        return
    plan.example = dict(sizes.bindings[0])
    plan.samples = sizes.bindings
    plan.limits = [*sizes.limits, *_limits(ctx, sizes)]
    for ports in (plan.inputs, plan.outputs):
        ports[:] = [with_open_sizes(port, ctx) for port in ports]
    shapes = [port.open.shape for port in plan.inputs if port.open is not None]
    texts = {size for shape in shapes for size in shape if isinstance(size, str)}
    known = {symbol for text in texts for symbol in Polynomial.parse(text).variables}
    for symbol in plan.example.keys() - known:
        raise StrategyError(
            f"the size {symbol} is that of no input, so that a run cannot tell it; fix sizes with "
            f"{sizes.flags}"
        )


def _limits(ctx: PassContext, sizes: OpenSizes) -> Iterator[tuple[Polynomial, Polynomial]]:
    """Yields pairs (a, b) of sizes where a <= b must hold in a run, so that no segment of a split
    dimension has a negative size. Segments of an unsplit dimension need no limits."""
    contexts = [ctx, *(other for _, other in ctx.lowered.replays)]
    columns: dict[tuple[int, ...], None] = {}
    for name in ctx.layouts:
        for dims in zip(*(context.layouts[name].dims for context in contexts), strict=True):
            split = [list(leaves(dim)) for dim in dims if dim_axes(dim)]
            if len(split) == len(dims) and len({*map(len, split)}) == 1:
                columns.update(
                    dict.fromkeys(tuple(f.size for f in c) for c in zip(*split, strict=True))
                )
    for column in columns:
        size = sizes.formula(column) if len(set(column)) > 1 else None
        if size is not None and not size.is_natural:
            yield Polynomial.constant(0), size


def with_open_sizes(port: Port, ctx: PassContext) -> Port:
    """Returns the port (an input or output) with formulas in place of its open sizes, or the port
    itself if none is open. Errors: StrategyError for a size that is not a polynomial of the
    symbols."""
    sizes = ctx.model.sizes
    if sizes is None:
        return port
    if port.layout is None:
        return _opened_strings(port, sizes)
    contexts = [ctx, *(other for _, other in ctx.lowered.replays)]
    layouts = [context.layouts[port.name] for context in contexts]
    shapes = [list(layout.shape) for layout in layouts]
    trees = [layout.to_json(normalized=False) for layout in layouts]
    for axis in range(len(shapes[0])):
        # At small sizes, a segment of an unsplit dimension may have fewer elements, or none.
        if not any(dim_axes(x.dims[axis]) for x in layouts):
            is_free = (port.name, axis) in sizes.free
            for tree, sizes_there in zip(trees, shapes, strict=True):
                tree["dims"][axis] = {"size": -1 if is_free else sizes_there[axis]}
    shape, tree = (_merged(x, sizes, port.name) for x in (shapes, trees))
    if any(s != -1 and _has_unknown(dim) for s, dim in zip(shape, tree["dims"], strict=True)):
        raise _no_formula(port.name, sizes)
    if tree == trees[0]:
        return port
    return replace(port, open=OpenPort([None if s == -1 else s for s in shape], tree))


def _opened_strings(port: Port, sizes: OpenSizes) -> Port:
    """Returns an input of strings with formulas in place of its open sizes. Such inputs have no
    layout."""
    open_ = {axis: size for (name, axis), size in sizes.dims.items() if name == port.name}
    if port.shape is None or not open_:
        return port
    shape = [str(open_[i]) if i in open_ else size for i, size in enumerate(port.shape)]
    return replace(port, open=OpenPort(shape, None))


def _merged(values: Sequence[Any], sizes: OpenSizes, name: str) -> Any:
    """Merges the JSON values of a layout at all sample sizes into one: numbers that differ become a
    formula, as text; -1 (data-dependent) at any of them stays -1."""
    first = values[0]
    if -1 in values:  # the size depends on data, at least at some bindings
        return -1
    if all(v == first for v in values[1:]):
        return first
    if isinstance(first, dict) and all(v.keys() == first.keys() for v in values):
        return {k: _merged([v[k] for v in values], sizes, name) for k in first}
    is_alike = all(type(v) is type(first) for v in values)
    if isinstance(first, list) and is_alike and len({*map(len, values)}) == 1:
        columns = zip(*values, strict=True)
        return [_merged(column, sizes, name) for column in columns]
    size = sizes.formula(values) if isinstance(first, int) and is_alike else None
    if size is None:
        raise _no_formula(name, sizes)
    return str(size)


def _has_unknown(dim: Any) -> bool:
    """True if a dimension (as JSON) has several parts, and the size of some part is unknown
    (-1)."""
    parts = [part for kind in ("concat", "product") for part in dim.get(kind, ())]
    return any(part.get("size") == -1 or _has_unknown(part) for part in parts)


def _no_formula(name: str, sizes: OpenSizes) -> StrategyError:
    return StrategyError(
        f"the sizes of '{name}' are not sums and products of open sizes; fix these with "
        f"{sizes.flags}"
    )
