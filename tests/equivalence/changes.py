"""Kinds of mutants: each function makes one seeded change of a bundle, or raises Nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import onnx
from execution import Array, ordered
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper
from subjects import MAIN, STATES, Mutant, Nothing, collectives

Change = Callable[[Random, Mutant], None]
MOST_CONSTANT = 64
"""The most elements of a constant; a larger initializer is a weight."""


def _program(random: Random, mutant: Mutant, *, states: bool = False) -> str:
    others = [p for p in mutant.subject.programs if p != MAIN and (states or p != STATES)]
    return random.choice(others) if others and random.random() < 0.2 else MAIN


def _ranks(random: Random, mutant: Mutant) -> list[int]:
    """One rank, or all."""
    every = list(range(mutant.subject.ranks))
    return random.choice([[random.choice(every)], every])


def _on(ranks: Sequence[int], mutant: Mutant) -> str:
    return "all ranks" if len(ranks) == mutant.subject.ranks else f"rank {ranks[0]}"


def _chosen(random: Random, items: Sequence[Any]) -> Any:
    if not items:
        raise Nothing
    return random.choice(items)


def _named(graph: GraphProto, name: str) -> NodeProto:
    """The node with this first result. Nothing if there is none."""
    for node in graph.node:
        if node.output and node.output[0] == name:
            return node
    raise Nothing


def _set(tensor: TensorProto, value: Array) -> None:
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(value, order="C"), tensor.name))


def _read(graph: GraphProto, name: str) -> list[NodeProto]:
    return [node for node in graph.node if name in node.input]


# Weights


def _weights(graph: GraphProto) -> list[TensorProto]:
    return [
        t for t in graph.initializer
        if np.prod(t.dims) > MOST_CONSTANT or (np.prod(t.dims) > 1 and not graph.node)
    ]  # fmt: skip


def _weight(random: Random, mutant: Mutant) -> tuple[str, int, TensorProto, Array]:
    program = _program(random, mutant, states=True)
    rank = random.randrange(mutant.subject.ranks)
    graph = mutant.graph(program, rank)
    tensor = _chosen(random, _weights(graph))
    mutant.changed[program].add(tensor.name)
    if program == STATES:
        mutant.ports.add(tensor.name)
    mutant.text = f"{tensor.name} of rank {rank}, {program}"
    return program, rank, tensor, numpy_helper.to_array(tensor).copy()


def shards_exchanged(random: Random, mutant: Mutant) -> None:
    """Two ranks have each other's shard of a weight."""
    program, _, tensor, own = _weight(random, mutant)
    found = []
    for other in range(mutant.subject.ranks):
        for theirs in mutant.subject.programs[program][other].graph.initializer:
            same = theirs.name == tensor.name and theirs.dims == tensor.dims
            if same and not np.array_equal(numpy_helper.to_array(theirs), own):
                found.append(other)
    other = _chosen(random, found)
    second = next(t for t in mutant.graph(program, other).initializer if t.name == tensor.name)
    theirs = numpy_helper.to_array(second).copy()
    _set(second, own)
    _set(tensor, theirs)


def bit_flipped(random: Random, mutant: Mutant) -> None:
    """One bit of one element of a weight differs."""
    _, _, tensor, own = _weight(random, mutant)
    flat = own.reshape(-1).view(np.uint8)
    flat[random.randrange(flat.size)] ^= 1 << random.randrange(8)
    _set(tensor, own)


def slice_stale(random: Random, mutant: Mutant) -> None:
    """A shard has the elements of another offset, or of another weight of the same shape."""
    program, rank, tensor, own = _weight(random, mutant)
    others = [
        t for t in mutant.subject.programs[program][rank].graph.initializer
        if t.name != tensor.name and t.dims == tensor.dims and t.data_type == tensor.data_type
    ]  # fmt: skip
    if others and random.random() < 0.5:
        _set(tensor, numpy_helper.to_array(random.choice(others)))
    else:
        axis = random.randrange(own.ndim)
        _set(tensor, np.roll(own, random.randrange(1, max(own.shape[axis], 2)), axis))


def rows_permuted(random: Random, mutant: Mutant) -> None:
    """Two positions of a dimension of a weight are exchanged."""
    _, _, tensor, own = _weight(random, mutant)
    axis = random.randrange(own.ndim)
    if own.shape[axis] < 2:
        raise Nothing
    i, j = random.sample(range(own.shape[axis]), 2)
    order = np.arange(own.shape[axis])
    order[[i, j]] = order[[j, i]]
    _set(tensor, own.take(order, axis))


# Constants


def _constants(graph: GraphProto) -> list[TensorProto]:
    found = [t for t in graph.initializer if 0 < np.prod(t.dims) <= MOST_CONSTANT]
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TENSOR and np.prod(attribute.t.dims) > 0:
                    attribute.t.name = node.output[0]
                    found.append(attribute.t)
    return [t for t in found if t.data_type != TensorProto.STRING]


def _constant(random: Random, mutant: Mutant, by: Callable[[Array], None]) -> None:
    program, ranks = _program(random, mutant), _ranks(random, mutant)
    name = _chosen(random, [t.name for t in _constants(mutant.graph(program, ranks[0]))])
    for rank in ranks:
        for tensor in _constants(mutant.graph(program, rank)):
            if tensor.name == name:
                value = numpy_helper.to_array(tensor).copy()
                by(value)
                _set(tensor, value)
    mutant.changed[program].add(name)
    mutant.text = f"{name} on {_on(ranks, mutant)}, {program}"


def constant_shifted(random: Random, mutant: Mutant) -> None:
    """One element of a constant is one more, or one less."""
    index, amount = random.random(), random.choice([1, -1])

    def by(value: Array) -> None:
        flat = value.reshape(-1)
        i = int(index * flat.size)
        flat[i] = not flat[i] if value.dtype.kind == "b" else flat[i] + amount

    _constant(random, mutant, by)


def constant_scaled(random: Random, mutant: Mutant) -> None:
    """A constant is multiplied."""
    factor = random.choice([2, 3, -1, 0.5, 1.001])

    def by(value: Array) -> None:
        if value.dtype.kind == "b":
            raise Nothing
        value[...] = (value * factor).astype(value.dtype)

    _constant(random, mutant, by)


def element_replaced(random: Random, mutant: Mutant) -> None:
    """One element of a constant has the value of another, or of zero."""
    one, two = random.random(), random.random()

    def by(value: Array) -> None:
        flat = value.reshape(-1)
        flat[int(one * flat.size)] = flat[int(two * flat.size)] if flat.size > 1 else 0

    _constant(random, mutant, by)


# Attributes


_FLAGS = ("keepdims", "transA", "transB", "ceil_mode", "count_include_pad", "allowzero", "largest",
          "sorted", "noop_with_empty_axes", "exclusive", "reverse", "storage_order")  # fmt: skip
"""Attributes that are 0 or 1; runtimes disagree about what other numbers mean."""


def _other(random: Random, name: str, value: Any, ranks: int) -> Any:
    """Another value of an attribute."""
    if isinstance(value, bytes):
        if name == "op":
            return random.choice([o for o in (b"sum", b"max", b"min", b"prod") if o != value])
        choices = [b"NOTSET", b"SAME_UPPER", b"SAME_LOWER", b"VALID", b"none", b"add", b"linear"]
        return random.choice([c for c in choices if c != value])
    if isinstance(value, float):
        return random.choice([value * 1.1 + 1e-6, value * 0.5, value + 1.0])
    if isinstance(value, int) and name in _FLAGS:
        return 1 - value
    if isinstance(value, int):
        near = [value + 1, value - 1, 0, 1, -value, value * 2]
        return random.choice([n for n in near if n != value])
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        own, way, i = list(value), random.randrange(4), random.randrange(len(value))
        if way == 0 and len(own) > 1:
            j = random.choice([k for k in range(len(own)) if k != i])
            own[i], own[j] = own[j], own[i]
        elif way == 1:
            own[i] += random.choice([1, -1])
        elif way == 2 and len(own) > 1:
            del own[i]
        else:
            own[i] = random.randrange(ranks + 1)
        return own
    raise Nothing


def _attribute(random: Random, mutant: Mutant, is_plugin: bool) -> None:
    program, ranks = _program(random, mutant), _ranks(random, mutant)
    graph = mutant.graph(program, ranks[0])
    model = mutant.files[program, ranks[0]]
    versions = {each.domain: each.version for each in model.opset_import}
    choices = []
    for node in graph.node:
        if node.op_type == "Constant" or (node.domain == "onnxpar") != is_plugin:
            continue
        for name, value in _attributes(node, versions):
            if name == "stash_type":
                continue  # of rounding, which onnxruntime ignores
            choices.append((node.output[0], name, value))
    result, name, value = _chosen(random, choices)
    if name == "program":
        raise Nothing  # the steps of a loop are ops, not a value
    after = _other(random, name, value, mutant.subject.ranks)
    for rank in ranks:
        node = _named(mutant.graph(program, rank), result)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, after)])
    mutant.changed[program] |= {name for name in node.output if name}
    mutant.calls |= {node.name} if is_plugin else set()
    where = f"{_on(ranks, mutant)}, {program}"
    mutant.text = f"{name} of {node.op_type} {node.name!r} is {after!r:.40} on {where}"


def _attributes(node: NodeProto, versions: Mapping[str, int]) -> list[tuple[str, Any]]:
    """The attributes of a node with numbers or text: its own, and those that have a default."""
    own = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.domain == "":
        schema = onnx.defs.get_schema(node.op_type, versions[""])
        for name, attribute in schema.attributes.items():
            if attribute.default_value.name and name not in own:
                own[name] = helper.get_attribute_value(attribute.default_value)
    kinds = (int, float, bytes, list, tuple)
    return [
        (n, list(v) if not isinstance(v, int | float | bytes) else v)
        for n, v in own.items()
        if isinstance(v, kinds) or type(v).__name__.startswith("Repeated")
    ]


def attribute_of_op(random: Random, mutant: Mutant) -> None:
    """An attribute of an op has another value: axis, perm, epsilon, pads, group, ..."""
    _attribute(random, mutant, False)


def attribute_of_collective(random: Random, mutant: Mutant) -> None:
    """An attribute of a collective has another value: op, group, axis, sizes, tag, stream, ..."""
    _attribute(random, mutant, True)


# Edges


def other_operand(random: Random, mutant: Mutant) -> None:
    """A node reads another tensor of the same shape and type."""
    program, ranks = _program(random, mutant), _ranks(random, mutant)
    graph, tensors = mutant.graph(program, ranks[0]), mutant.subject.tensors[program][ranks[0]]
    i = random.randrange(len(graph.node))
    node = graph.node[i]
    index = _chosen(random, [k for k, n in enumerate(node.input) if n in tensors])
    sources = [port.name for port in graph.input] + [t.name for t in graph.initializer]
    sources += [name for earlier in graph.node[:i] for name in earlier.output]
    before = node.input[index]
    name = _chosen(
        random, [n for n in sources if n != before and tensors.get(n) == tensors[before]]
    )
    for rank in ranks:
        _named(mutant.graph(program, rank), node.output[0]).input[index] = name
    mutant.changed[program] |= {name for name in node.output if name}
    where = f"{_on(ranks, mutant)}, {program}"
    mutant.text = f"{node.op_type} {node.name!r} reads {name!r} for {before!r} on {where}"


def operands_swapped(random: Random, mutant: Mutant) -> None:
    """Two operands of a node are exchanged."""
    program, ranks = _program(random, mutant), _ranks(random, mutant)
    graph, tensors = mutant.graph(program, ranks[0]), mutant.subject.tensors[program][ranks[0]]
    choices = []
    for node in graph.node:
        known = [k for k, n in enumerate(node.input) if n in tensors and node.domain == ""]
        for i in known:
            for j in known:
                one, two = tensors[node.input[i]], tensors[node.input[j]]
                if i < j and node.input[i] != node.input[j] and one[1] == two[1]:
                    choices.append((node, i, j))
    node, i, j = _chosen(random, choices)
    for rank in ranks:
        own = _named(mutant.graph(program, rank), node.output[0])
        own.input[i], own.input[j] = own.input[j], own.input[i]
    mutant.changed[program] |= {name for name in node.output if name}
    where = f"{_on(ranks, mutant)}, {program}"
    mutant.text = f"operands {i} and {j} of {node.op_type} {node.name!r} on {where}"


def _end(graph: GraphProto, node: NodeProto) -> NodeProto:
    """The node with the result of a collective: its Complete if it is in two ops."""
    if not node.op_type.startswith("Start"):
        return node
    return next(n for n in graph.node if n.op_type == "Complete" and n.input[0] == node.output[0])


def _collective(random: Random, mutant: Mutant) -> tuple[str, NodeProto]:
    program = _program(random, mutant)
    node = _chosen(random, list(collectives(mutant.graph(program, 0))))
    mutant.text = f"{node.op_type} {node.name!r}, {program}"
    return program, node


def collective_dropped(random: Random, mutant: Mutant) -> None:
    """The readers of a collective's result read its operand."""
    program, chosen = _collective(random, mutant)
    ranks = _ranks(random, mutant)
    for rank in ranks:
        graph = mutant.graph(program, rank)
        node = _named(graph, chosen.output[0])
        end = _end(graph, node)
        readers = _read(graph, end.output[0])
        if not readers:
            raise Nothing
        for reader in readers:
            for i, name in enumerate(reader.input):
                if name == end.output[0]:
                    reader.input[i] = node.input[0]
        mutant.changed[program] |= {end.output[0], *(r.output[0] for r in readers)}
    mutant.text += f" on {_on(ranks, mutant)}"


def collective_doubled(random: Random, mutant: Mutant) -> None:
    """A collective is applied once more, to its own result, on all ranks."""
    program, chosen = _collective(random, mutant)
    if chosen.op_type.startswith("Start"):
        raise Nothing
    for rank in range(mutant.subject.ranks):
        graph = mutant.graph(program, rank)
        node = _named(graph, chosen.output[0])
        result, token = node.output[0], node.output[-1]
        for reader in _read(graph, result) + _read(graph, token):
            for i, name in enumerate(reader.input):
                if name in (result, token):
                    reader.input[i] = f"{name}::again"
        again = NodeProto()
        again.CopyFrom(node)
        again.name += "::again"
        again.input[0], again.input[-1] = result, token
        again.output[0], again.output[-1] = f"{result}::again", f"{token}::again"
        for attribute in again.attribute:
            if attribute.name == "tag":
                attribute.i = 100_000
        graph.node.insert([*graph.node].index(node) + 1, again)
        mutant.changed[program] |= {result, f"{result}::again"}
        if result in {port.name for port in graph.output}:
            raise Nothing
    mutant.calls |= {chosen.name, f"{chosen.name}::again"}


def bias_on_all_ranks(random: Random, mutant: Mutant) -> None:
    """What is added to the result of a sum over ranks is added on each of them before the sum."""
    program = _program(random, mutant)
    graph = mutant.graph(program, 0)
    tensors = mutant.subject.tensors[program][0]
    choices = []
    for node in collectives(graph):
        if node.op_type.removeprefix("Start") not in ("AllReduce", "ReduceScatter"):
            continue
        result = _end(graph, node).output[0]
        for reader in _read(graph, result):
            if reader.op_type == "Add":
                other = reader.input[1 - list(reader.input).index(result)]
                if other in tensors and tensors[node.input[0]][0][-1:] == tensors[other][0][-1:]:
                    choices.append((node.output[0], reader.output[0], other))
    first, last, bias = _chosen(random, choices)
    for rank in range(mutant.subject.ranks):
        graph = mutant.graph(program, rank)
        node, reader = _named(graph, first), _named(graph, last)
        result = _end(graph, node).output[0]
        made = helper.make_node("Add", [node.input[0], bias], [f"{node.input[0]}::biased"])
        node.input[0] = made.output[0]
        graph.node.insert([*graph.node].index(node), made)
        reader.op_type = "Identity"
        del reader.input[:]
        reader.input.append(result)
    mutant.changed[program] |= {f"{first}", result, last, made.output[0]}
    mutant.text = f"{bias!r} is added before {node.op_type} {node.name!r}, {program}"


# Order


def tokens_swapped(random: Random, mutant: Mutant) -> None:
    """Two neighbours in the order of a rank's collectives change places."""
    program, rank = _program(random, mutant), random.randrange(mutant.subject.ranks)
    graph = mutant.graph(program, rank)
    plugin = [n for n in graph.node if n.domain == "onnxpar" and len(n.output) > 1]
    makers = {n.output[-1]: n for n in plugin if n.op_type != "FusedElementwise"}
    pairs = []
    for later in makers.values():
        earlier = makers.get(later.input[-1])
        if earlier is not None and not _depends(graph, later, earlier.output[0]):
            pairs.append((earlier, later))
    earlier, later = _chosen(random, pairs)
    readers = _read(graph, later.output[-1])
    start, between, end = earlier.input[-1], earlier.output[-1], later.output[-1]
    for reader in readers:
        reader.input[list(reader.input).index(end)] = between
    earlier.input[len(earlier.input) - 1] = end
    later.input[len(later.input) - 1] = start
    nodes = _sorted(graph)
    del graph.node[:]
    graph.node.extend(nodes)
    mutant.calls |= {earlier.name, later.name}
    mutant.text = f"{earlier.name!r} and {later.name!r} of rank {rank}, {program}"


def _sorted(graph: GraphProto) -> list[NodeProto]:
    return [NodeProto.FromString(node.SerializeToString()) for node in ordered(graph)]


def _depends(graph: GraphProto, node: NodeProto, on: str) -> bool:
    """True if a node's data depend on a tensor."""
    makers = {name: n for n in graph.node for name in n.output}
    todo, seen = list(node.input[:-1]), set[str]()
    while todo:
        name = todo.pop()
        if name == on:
            return True
        if name not in seen and name in makers:
            seen.add(name)
            maker = makers[name]
            todo += maker.input[:-1] if maker.domain == "onnxpar" else maker.input
    return False


def tags_exchanged(random: Random, mutant: Mutant) -> None:
    """Two collectives of a rank have each other's tag."""
    program, rank = _program(random, mutant), random.randrange(mutant.subject.ranks)
    nodes = list(collectives(mutant.graph(program, rank)))
    if len(nodes) < 2:
        raise Nothing
    one, two = random.sample(nodes, 2)
    a, b = (next(a for a in n.attribute if a.name == "tag") for n in (one, two))
    a.i, b.i = b.i, a.i
    mutant.calls |= {one.name, two.name}
    mutant.changed[program] |= {one.output[0], two.output[0]}
    mutant.text = f"{one.name!r} and {two.name!r} of rank {rank}, {program}"


def read_too_early(random: Random, mutant: Mutant) -> None:
    """What reads the result of a Complete reads the memory of its Start."""
    program, ranks = _program(random, mutant), _ranks(random, mutant)
    starts = [n for n in collectives(mutant.graph(program, 0)) if n.op_type.startswith("Start")]
    chosen = _chosen(random, starts)
    for rank in ranks:
        graph = mutant.graph(program, rank)
        node = _named(graph, chosen.output[0])
        end = _end(graph, node)
        for reader in _read(graph, end.output[0]):
            reader.input[list(reader.input).index(end.output[0])] = node.output[0]
            mutant.changed[program].add(reader.output[0])
        mutant.changed[program].add(end.output[0])
    mutant.text = f"{chosen.name!r} on {_on(ranks, mutant)}, {program}"


# Plan


def port_layout(random: Random, mutant: Mutant) -> None:
    """A port has another layout: a dimension is split, whole, or split in another way."""
    plan = mutant.edited_plan()
    port = _chosen(random, [p for p in (*plan["inputs"], *plan["outputs"]) if p["layout"]])
    dim = _chosen(random, port["layout"]["dims"])
    axis, size = random.choice(plan["mesh"])
    if "axes" in dim and random.random() < 0.5:
        del dim["axes"]
    elif random.random() < 0.2 and len(port["layout"]["dims"]) > 1:
        port["layout"]["dims"].reverse()
    else:
        dim["axes"] = [[axis, size, 1]]
    mutant.ports.add(port["name"])
    mutant.inputs |= {port["name"]} & {each["name"] for each in plan["inputs"]}
    mutant.text = f"{port['name']} is {port['layout']['dims']}"


def states_exchanged(random: Random, mutant: Mutant) -> None:
    """Two states get each other's next value, in a step that says which it is."""
    if not any(entry.key == "onnxpar.training" for entry in mutant.subject.proto.metadata_props):
        raise Nothing
    states = mutant.edited_plan()["states"]
    shapes = {p["name"]: (p["shape"], p["dtype"]) for p in mutant.subject.plan["inputs"]}
    pairs = [
        (a, b)
        for a in states
        for b in states
        if a["input"] < b["input"] and shapes[a["input"]] == shapes[b["input"]]
    ]
    one, two = _chosen(random, pairs)
    one["output"], two["output"] = two["output"], one["output"]
    mutant.ports |= {one["input"], two["input"], one["output"], two["output"]}
    mutant.text = f"{one['input']} and {two['input']}"


def size_form(random: Random, mutant: Mutant) -> None:
    """An open size of a port has another form."""
    plan = mutant.edited_plan()
    choices = [
        (port, dim)
        for port in (*plan["inputs"], *plan["outputs"])
        for dim in (port["layout"] or {"dims": ()})["dims"]
        if isinstance(dim.get("size"), str)
    ]
    port, dim = _chosen(random, choices)
    dim["size"] = random.choice([f"{dim['size']} + 1", f"2*({dim['size']})", f"({dim['size']})//2"])
    mutant.ports.add(port["name"])
    mutant.inputs |= {port["name"]} & {each["name"] for each in plan["inputs"]}
    mutant.text = f"a size of {port['name']} is {dim['size']}"


KINDS: dict[str, Change] = {
    "weights: shards exchanged": shards_exchanged,
    "weights: bit flipped": bit_flipped,
    "weights: stale slice": slice_stale,
    "weights: rows permuted": rows_permuted,
    "constants: shifted": constant_shifted,
    "constants: scaled": constant_scaled,
    "constants: another element": element_replaced,
    "attributes: of an op": attribute_of_op,
    "attributes: of a collective": attribute_of_collective,
    "edges: another operand": other_operand,
    "edges: operands swapped": operands_swapped,
    "edges: collective dropped": collective_dropped,
    "edges: collective doubled": collective_doubled,
    "edges: added on all ranks": bias_on_all_ranks,
    "order: tokens": tokens_swapped,
    "order: tags": tags_exchanged,
    "order: read too early": read_too_early,
    "plan: layout of a port": port_layout,
    "plan: states exchanged": states_exchanged,
    "plan: form of a size": size_form,
}
