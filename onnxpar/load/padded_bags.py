"""Recognizes the loops that PyTorch's dynamo exporter writes for `nn.EmbeddingBag` with a
`padding_idx`.

An iteration takes one bag (a group of consecutive rows, see `bag_loops.py`): an inner loop lists
the rows whose ids are not the padding, and the sum, mean or maximum of these rows is the result, or
zeros if there are none.
"""

from __future__ import annotations

from onnx import NodeProto

from onnxpar.load.bag_names import (
    REDUCTIONS,
    Bags,
    Names,
    Padding,
    offsets_of,
    results_of,
)


def padded_bags(
    choice: NodeProto, counter: str, count: int, nodes: list[NodeProto], names: Names
) -> Bags | None:
    """Returns the bags of a Loop whose body lists, by an inner Loop, the rows of a bag that are not
    padding; None if it is of another form.

    choice   the If of the body that gives zeros for a bag without such rows, else their reduction
    counter  the body's input with the number of the iteration
    count    the number of bags
    nodes    the nodes outside of the body to replace
    """
    branches = results_of(choice)
    zeros, last = names.value(branches["then_branch"]), names.made.get(branches["else_branch"])
    is_empty = names.node(choice.input[0], "Equal")
    size = None if is_empty is None else names.node(is_empty.input[0], "Size")
    if last is None or last.op_type not in REDUCTIONS or zeros is None or zeros.any():
        return None
    rows = names.node(last.input[0], "Gather")
    is_first = len(last.input) > 1 and names.is_value(last.input[1], 0)
    if is_empty is None or size is None or rows is None or any(a.i for a in rows.attribute):
        return None
    inner = names.node(rows.input[1], "Loop")
    is_none = names.number(is_empty.input[1]) == 0 and size.input[0] == rows.input[1]
    if inner is None or not is_first or not is_none or any(a.i != 1 for a in last.attribute):
        return None
    listed = _counted(inner, rows.input[1], names)
    if listed is None or rows.input[0] in names.inside:
        return None
    padding, pair = listed
    start, end = (names.bound(name, counter) for name in pair)
    offsets = None if start is None or end is None else offsets_of(start, end, count, names)
    if offsets is None:
        return None
    return Bags(last.op_type, rows.input[0], pair, offsets, count, nodes, padding)


def _counted(loop: NodeProto, result: str, names: Names) -> tuple[Padding, tuple[str, str]] | None:
    """Returns what the inner Loop does: the padding that it leaves out, and the bounds (start, end)
    of the rows that it lists in its output `result`. None if it is of another form."""
    body = next(a.g for a in loop.attribute if a.name == "body")
    if len(loop.input) != 4 or loop.input[0] or result not in loop.output:
        return None
    kept = list(loop.output).index(result)
    none, before = names.value(loop.input[2 + kept]), body.input[2 + kept].name
    counted, at = loop.input[3 - kept], body.input[3 - kept].name
    first, more = names.node(loop.input[1], "Less"), names.node(body.output[0].name, "Less")
    grown = names.node(body.output[1 + kept].name, "If")
    if none is None or none.size or first is None or more is None or grown is None:
        return None
    start, end = first.input
    steps = names.steps(body.output[2 - kept].name, at), names.steps(more.input[0], at)
    if start != counted or more.input[1] != end or steps != (1, 1):
        return None
    branches = results_of(grown)
    longer = names.node(branches["then_branch"], "Concat")
    same = names.node(branches["else_branch"], "Identity")
    if longer is None or same is None or list(same.input) != [before]:
        return None
    if longer.input[0] != before or names.steps(longer.input[1], at) != 0:
        return None
    padding = _padding(grown.input[0], at, names)
    return None if padding is None else (padding, (start, end))


def _padding(condition: str, at: str, names: Names) -> Padding | None:
    """Returns the padding if `condition` is true where the id at row `at` is not the padding id;
    else None."""
    differs = names.node(condition, "Not")
    is_one = None if differs is None else names.node(differs.input[0], "Equal")
    choice = None if is_one is None else names.node(is_one.input[0], "If")
    is_below = None if choice is None else names.node(choice.input[0], "Less")
    if is_one is None or choice is None or is_below is None:
        return None
    branches = results_of(choice)
    shifted = names.node(branches["then_branch"], "Add")
    same = names.node(branches["else_branch"], "Identity")
    if shifted is None or same is None or names.number(is_below.input[1]) != 0:
        return None
    index = names.node(is_below.input[0], "Gather")
    is_same = is_below.input[0] == shifted.input[0] == same.input[0]
    one, height = (names.number(name) for name in (is_one.input[1], shifted.input[1]))
    if index is None or not is_same or names.steps(index.input[1], at) != 0:
        return None
    if one is None or height is None:
        return None
    if index.input[0] in names.inside or any(a.i for a in index.attribute):
        return None
    return Padding(str(index.input[0]), one, height)
