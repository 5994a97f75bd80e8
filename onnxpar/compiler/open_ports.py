"""Gives the ports of a plan their open sizes, fitted to the layouts at every binding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onnxpar.compiler.pass_ import PassContext
from onnxpar.compiler.plan import OpenPort, Plan, Port
from onnxpar.errors import StrategyError
from onnxpar.layout.layout import dim_axes
from onnxpar.open_sizes.open_sizes import OpenSizes
from onnxpar.symbols.fits import fit


def open_ports(plan: Plan, ctx: PassContext) -> None:
    """Gives the plan's ports their open sizes. Errors: StrategyError for a size that is not a
    polynomial of the symbols."""
    sizes = ctx.model.sizes
    if sizes is None:
        return
    plan.example = dict(sizes.bindings[0])
    for ports in (plan.inputs, plan.outputs):
        ports[:] = [opened_port(port, ctx) for port in ports]


def opened_port(port: Port, ctx: PassContext) -> Port:
    """Returns the port with its open sizes, or the port itself if none of its sizes is open.
    Errors: StrategyError for a size that is not a polynomial of the symbols."""
    sizes = ctx.model.sizes
    if sizes is None:
        return port
    if port.layout is None:
        return _opened_strings(port, sizes)
    contexts = [ctx, *(other for _, other in ctx.lowered.replays)]
    layouts = [each.layouts[port.name] for each in contexts]
    shapes = [list(layout.shape) for layout in layouts]
    trees = [layout.to_json(normalized=False) for layout in layouts]
    shape, tree = (_merged(x, sizes, port.name) for x in (shapes, trees))
    for axis in range(len(shape)):
        # At small sizes, a segment of an unsplit dimension may have fewer elements, or none.
        if not any(dim_axes(x.dims[axis]) for x in layouts):
            is_free = (port.name, axis) in sizes.free
            tree["dims"][axis] = {"size": -1 if is_free else shape[axis]}
    if tree == trees[0]:
        return port
    return replace(port, open=OpenPort([None if s == -1 else s for s in shape], tree))


def _opened_strings(port: Port, sizes: OpenSizes) -> Port:
    """Returns an input of strings with its open sizes; it has a shape, but no layout."""
    open_ = {axis: size for (name, axis), size in sizes.dims.items() if name == port.name}
    if port.shape is None or not open_:
        return port
    shape = [str(open_[i]) if i in open_ else size for i, size in enumerate(port.shape)]
    return replace(port, open=OpenPort(shape, None))


def _merged(values: Sequence[Any], sizes: OpenSizes, name: str) -> Any:
    """Merges the JSON values of all bindings into one: where numbers differ, the formula as
    text."""
    first = values[0]
    if -1 in values:  # what only data decides, at some bindings at least
        return -1
    if all(v == first for v in values[1:]):
        return first
    if isinstance(first, dict):
        return {k: _merged([v[k] for v in values], sizes, name) for k in first}
    if isinstance(first, list):
        columns = zip(*values, strict=True)
        return [_merged(column, sizes, name) for column in columns]
    size = fit(values, sizes.variables()) if isinstance(first, int) else None
    if size is None:
        raise StrategyError(
            f"the sizes of '{name}' are not sums and products of open sizes; fix these with "
            f"{sizes.flags}"
        )
    return str(size)
