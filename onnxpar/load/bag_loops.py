"""Recognizes the loops that PyTorch's exporters write for `nn.EmbeddingBag`.

A bag is a group of consecutive rows that are reduced to one row: with offsets [0, 2, 5], bag 0 has
rows 0 and 1, bag 1 rows 2 to 4. An iteration takes one bag: a slice of the ids (legacy exporter) or
of the looked-up rows (dynamo), and the sum, mean or maximum of its rows. The dynamo exporter lets
the last bag end with the rows, in a branch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, NodeProto

from onnxpar.load.bag_names import REDUCTIONS, Bags, Names, offsets_of, results_of
from onnxpar.load.padded_bags import padded_bags


def bags_of(node: NodeProto, names: Names) -> Bags | None:
    """Returns the bags that a Loop reduces; None if the node is no Loop of this kind."""
    if node.op_type != "Loop" or node.domain not in ("", "ai.onnx"):
        return None
    if not names.is_value(node.input[1], 1):
        return None
    body = next(a.g for a in node.attribute if a.name == "body")
    if len(node.input) == 2 and len(node.output) == 1:
        return _bags_of_ids(node, body, names)
    if len(node.input) == 4 and len(node.output) == 2:
        return _bags_of_rows(node, body, names)
    return None


def _bags_of_ids(node: NodeProto, body: GraphProto, names: Names) -> Bags | None:
    """Returns the bags of a Loop as the legacy exporter writes it; else None. A scan output of its
    `body` stacks the reduced rows."""
    count = names.number(node.input[0]) if node.input[0] else None
    counter, last = body.input[0].name, names.node(body.output[1].name, *REDUCTIONS)
    if count is None or last is None or not names.is_value(body.output[0].name, 1):
        return None
    return _bags_with(last, 0, counter, count, [node], names)


def _bags_of_rows(node: NodeProto, body: GraphProto, names: Names) -> Bags | None:
    """Returns the bags of a Loop as the dynamo exporter writes it; else None. In its `body`,
    SequenceInsert appends the reduced rows to a sequence. The operands of the Loop, the sequence
    and the number of the bag, may be in either order."""
    kept, counted = (0, 1) if names.node(node.input[2], "SequenceEmpty") else (1, 0)
    sequence, at = body.input[2 + kept].name, body.input[2 + counted].name
    more = names.node(body.output[0].name, "Less")
    grown = names.node(body.output[1 + kept].name, "SequenceInsert")
    listed, number = node.output[kept], node.output[counted]
    joined = [n for n in names.graph.node if listed in n.input]
    is_read_once = names.reads.count(listed) == 1 and number not in names.reads
    if (
        more is None
        or grown is None
        or node.input[0]
        or len(grown.input) != 2
        or grown.input[0] != sequence
        or names.node(node.input[2 + kept], "SequenceEmpty") is None
        or names.number(node.input[2 + counted]) != 0
        or names.steps(more.input[0], at) != 1
        or names.steps(body.output[1 + counted].name, at) != 1
        or not is_read_once
        or [n.op_type for n in joined] != ["ConcatFromSequence"]
        or any(a.i != 0 for a in joined[0].attribute)
    ):
        return None
    count = names.number(more.input[1])
    choice = names.node(grown.input[1], "If")
    if count is None or count < 1 or choice is None:
        return None
    branches = results_of(choice)
    reduced = branches["else_branch"]
    padded = padded_bags(choice, at, count, [node, joined[0]], names)
    if padded is not None:
        return padded
    last = names.node(_usual(reduced, at, count, names), *REDUCTIONS)
    if last is not None:
        _usual(last.input[0], at, count, names)
    zeros = names.value(branches["then_branch"])
    is_empty = names.node(choice.input[0], "Equal")
    if last is None or zeros is None or zeros.any() or is_empty is None:
        return None
    bags = _bags_with(last, 1, at, count, [node, joined[0]], names)
    if bags is None or {*is_empty.input} != {*bags.bounds}:
        return None
    is_apart = reduced in names.usual or last.input[0] in names.usual
    return None if is_apart and not _end_with_rows(bags, names) else bags


def _bags_with(
    last: NodeProto, keepdims: int, counter: str, count: int, nodes: list[NodeProto], names: Names
) -> Bags | None:
    """Returns the bags, given `last`, the node of the Loop's body that reduces the rows of one bag.
    None if the node, or the bounds of the bags, have another form.

    keepdims  the value that `keepdims` of `last` must have
    counter   the body's input with the number of the iteration
    count     the number of bags
    nodes     the nodes outside of the body to replace
    """
    attributes = {a.name: a for a in last.attribute}
    is_first = len(last.input) > 1 and names.is_value(last.input[1], 0)
    kept = attributes["keepdims"].i if "keepdims" in attributes else 1
    bounds = {*_slices(last.input[0], names)}
    if not is_first or kept != keepdims or len(bounds) != 1:
        return None
    (pair,) = bounds
    start, end = (names.bound(name, counter) for name in pair)
    if start is None or end is None:
        return None
    offsets = offsets_of(start, end, count, names)
    if offsets is None:
        return None
    return Bags(last.op_type, last.input[0], pair, offsets, count, nodes)


def _usual(name: str, counter: str, count: int, names: Names) -> str:
    """Returns the tensor that stands for `name` in all bags but the last.

    The exporter may write an If that takes its then-branch only for the last of `count` bags. If
    the else-branch would give the same there, provided that the last bag ends with the last row,
    returns the result of the else-branch, and records it in `names.usual`. Otherwise `name`.
    """
    choice = names.node(name, "If")
    is_last = names.node(choice.input[0], "Equal") if choice is not None else None
    if choice is None or is_last is None:
        return name
    branches = results_of(choice)
    last, other = branches["then_branch"], branches["else_branch"]
    at = names.steps(is_last.input[0], counter), names.number(is_last.input[1])
    if at != (0, count - 1):
        return name
    if _are_equal_slices(last, other, names) or _are_equal_means(last, other, names):
        names.usual[name] = other
    return names.usual.get(name, name)


def _are_equal_slices(last: str, other: str, names: Names) -> bool:
    """True if `last` is a Slice of rows to their end, and `other` a Slice of the same rows from the
    same start. They are equal if the last bag ends with the last row."""
    one, two = names.node(last, "Slice"), names.node(other, "Slice")
    if one is None or two is None or one.input[:2] != two.input[:2]:
        return False
    shape = names.shape(one.input[0])
    is_whole = shape is not None and names.number(one.input[2]) == shape[0]
    return is_whole and names.is_plain(one) and names.is_plain(two)


def _are_equal_means(last: str, other: str, names: Names) -> bool:
    """True if `other` is the mean of a bag's rows, and `last` their sum divided by the number of
    rows from the bag's start to the end of all rows. They are equal if the last bag ends with the
    last row."""
    mean, choice = names.node(other, "ReduceMean"), names.node(last, "If")
    is_some = names.node(choice.input[0], "Greater") if choice is not None else None
    if mean is None or choice is None or is_some is None or names.number(is_some.input[1]) != 0:
        return False
    branches = results_of(choice)
    ratio = names.node(branches["then_branch"], "Div")
    rows, count = names.node(mean.input[0], "Slice"), names.node(is_some.input[0], "Sub")
    if ratio is None or rows is None or count is None:
        return False
    total, divisor = names.node(ratio.input[0], "ReduceSum"), names.node(ratio.input[1], "Cast")
    shape = names.shape(rows.input[0])
    return (
        total is not None
        and divisor is not None
        and shape is not None
        and divisor.input[0] == is_some.input[0]
        and total.input[0] == mean.input[0]
        and names.is_value(total.input[1], 0)
        and count.input[1] == rows.input[1]
        and names.number(count.input[0]) == shape[0]
    )


def _end_with_rows(bags: Bags, names: Names) -> bool:
    """True if the last bag ends with the last row."""
    node = names.node(names.usual.get(bags.rows, bags.rows), "Slice")
    shape = None if node is None else names.shape(node.input[0])
    known, joined = names.value(bags.offsets), names.node(bags.offsets, "Concat")
    if shape is None:
        return False
    if known is not None:
        return bool(known[-1] == shape[0])
    return joined is not None and names.is_value(joined.input[-1], shape[0])


def _slices(name: str, names: Names) -> Iterator[tuple[str, str]]:
    """Yields the bounds (start, end) of each Slice from which tensor `name` of the body is
    computed. Yields a pair of empty texts for a node that does not compute each row from the same
    row of its operand."""
    node = names.made.get(names.usual.get(name, name))
    if node is None or name not in names.inside:
        yield "", ""
    elif node.op_type == "Slice" and node.input[0] not in names.inside and names.is_plain(node):
        yield node.input[1], node.input[2]
    elif node.op_type == "Gather" and node.input[0] not in names.inside:
        yield ("", "") if any(a.i for a in node.attribute) else next(_slices(node.input[1], names))
    elif node.op_type == "Mul":
        for operand in node.input:
            yield from _slices(operand, names)
    elif node.op_type == "Unsqueeze" and names.is_value(node.input[1], 1):
        yield from _slices(node.input[0], names)
    else:
        yield "", ""
