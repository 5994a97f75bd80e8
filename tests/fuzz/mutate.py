"""Breaks a model in one to three places, the same ones for the same source of chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

INTS = (0, -1, 1, 2, 3, 7, 16, 99, 127, 1 << 31, 1 << 40, 1 << 62, -(1 << 31), -(1 << 63))
FLOATS = (0.0, -1.0, float("nan"), float("inf"), 1e38, -1e-45)
TEXTS = ("", "\0", "a\0b", "x", "abc", "-1", "../../etc/passwd", "/", "é\n'", "x" * 3000, "ai.onnx",
         "com.microsoft", "99999999999999999999", "onnxpar")  # fmt: skip
OPS = ("Relu", "MatMul", "Add", "If", "Loop", "Scan", "Constant", "Reshape", "Gather", "Concat",
       "Split", "Cast", "Transpose", "Slice", "Expand", "ConstantOfShape", "Range", "TopK",
       "SequenceAt", "Conv", "ReduceSum", "Unsqueeze", "NoSuchOp", "Shape", "Dropout", "Einsum",
       "LSTM", "Pad", "Where", "Tile", "DequantizeLinear", "Identity",
       "OptionalGetElement")  # fmt: skip


def mutated(model: ModelProto, chance: random.Random, only: tuple[str, ...] = ()) -> bytes:
    """The bytes of the broken model; `only` names the fields within which it breaks."""
    if not only and chance.random() < 0.12:
        return _damaged(model.SerializeToString(), chance)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        try:
            chance.choice(_CHANGES if not only else (_any_field,))(model, chance, only)
        except (ValueError, TypeError, IndexError):  # no room for that value, or no node
            continue
    return model.SerializeToString()


def _damaged(data: bytes, chance: random.Random) -> bytes:
    spoiled = bytearray(data)
    if chance.random() < 0.3:
        return bytes(spoiled[: chance.randrange(len(spoiled))])
    for _ in range(chance.choice((1, 2, 8))):
        spoiled[chance.randrange(min(len(spoiled), 4000))] = chance.randrange(256)
    return bytes(spoiled)


def messages(message: Any) -> Iterator[Any]:
    """The message and all within it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                yield from messages(inner)


def _any_field(model: ModelProto, chance: random.Random, only: tuple[str, ...]) -> None:
    """Clears, repeats, moves or replaces a field of any message."""
    if only:
        roots = [i for m in messages(model) for f, v in m.ListFields() if f.name in only for i in v]
        pool = [m for root in roots for m in messages(root)]
    else:
        pool = list(messages(model))
    message = chance.choice(pool)
    fields = message.ListFields() if chance.random() < 0.8 else []
    if not fields:
        fields = [(f, getattr(message, f.name)) for f in message.DESCRIPTOR.fields]
    field, value = chance.choice(fields)
    if chance.random() < 0.25:
        message.ClearField(field.name)
    elif field.is_repeated:
        _spoil_list(value, field, chance, model)
    elif field.message_type is not None:
        others = [m for m in messages(model) if m.DESCRIPTOR is field.message_type]
        value.CopyFrom(_copy(chance.choice(others))) if others else value.SetInParent()
    else:
        setattr(message, field.name, _scalar(field, value, chance, model))


def _spoil_list(values: Any, field: Any, chance: random.Random, model: ModelProto) -> None:
    is_message = field.message_type is not None
    way = chance.random()
    if values and way < 0.3:
        del values[chance.randrange(len(values))]
    elif values and way < 0.6:
        at = chance.randrange(len(values))
        if is_message:
            values.add().CopyFrom(_copy(values[at]))
        else:
            values[at] = _scalar(field, values[at], chance, model)
    elif is_message:
        others = [m for m in messages(model) if m.DESCRIPTOR is field.message_type]
        values.add().CopyFrom(_copy(chance.choice(others))) if others else values.add()
    else:
        values.append(_scalar(field, None, chance, model))


def _copy(message: Any) -> Any:
    """The message apart from where it stands: what receives it may be in it, or it in that."""
    apart = type(message)()
    apart.CopyFrom(message)
    return apart


def _scalar(field: Any, value: Any, chance: random.Random, model: ModelProto) -> Any:
    if field.type == field.TYPE_STRING:
        return chance.choice((*TEXTS, *_names(model)[:40]))
    if field.type == field.TYPE_BYTES:
        data = bytes(value or b"")
        return chance.choice(
            (b"", data[:-1], data + b"\0", data[::-1], data[1:], b"\xff\xfe", b"\0")
        )
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return chance.choice(FLOATS)
    if field.cpp_type == field.CPPTYPE_BOOL:
        return chance.random() < 0.5
    return chance.choice(INTS)


def _names(model: ModelProto) -> list[str]:
    return list(dict.fromkeys(n for node in model.graph.node for n in (*node.input, *node.output)))


def _nodes(model: ModelProto) -> list[Any]:
    return [m for m in messages(model) if m.DESCRIPTOR.name == "NodeProto"]


def _rewire(model: ModelProto, chance: random.Random, _: Any) -> None:
    """A node reads or makes another tensor, which may close a cycle."""
    node = chance.choice(_nodes(model))
    names = chance.choice((node.input, node.output))
    if names:
        names[chance.randrange(len(names))] = chance.choice((*_names(model), "", "gone"))


def _other_op(model: ModelProto, chance: random.Random, _: Any) -> None:
    chance.choice(_nodes(model)).op_type = chance.choice(OPS)


def _odd_attribute(model: ModelProto, chance: random.Random, _: Any) -> None:
    """An attribute has another type or value, or goes."""
    node = chance.choice([n for n in _nodes(model) if n.attribute] or _nodes(model))
    if node.attribute and chance.random() < 0.3:
        del node.attribute[chance.randrange(len(node.attribute))]
        return
    known = ("axis", "axes", "to", "value", "perm", "keepdims", "body", "num_scan_inputs", "pads")
    name = chance.choice([*(a.name for a in node.attribute), *known])
    tensor = numpy_helper.from_array(np.float32([1, 2]))
    values = (1, -1, 1 << 40, 0.5, "text", [1, 2], [], [1.5], tensor, model.graph)
    value: Any = chance.choice(values)
    for i in reversed([i for i, a in enumerate(node.attribute) if a.name == name]):
        del node.attribute[i]
    made = helper.make_attribute(name, value, attr_type=7 if value == [] else None)
    node.attribute.append(made)


def _odd_type(model: ModelProto, chance: random.Random, _: Any) -> None:
    """A port has another type, or sizes that are odd or gone."""
    ports = [m for m in messages(model) if m.DESCRIPTOR.name == "ValueInfoProto"]
    type_ = chance.choice(ports).type
    way = chance.randrange(5)
    if way == 0:
        type_.tensor_type.elem_type = chance.choice(range(0, 30))
    elif way == 1:
        type_.tensor_type.ClearField("shape")
    elif way == 2:
        type_.sequence_type.elem_type.tensor_type.elem_type = 1
    else:
        dims = type_.tensor_type.shape.dim
        dim = chance.choice(dims) if dims and way == 3 else dims.add()
        if chance.random() < 0.5:
            dim.dim_param = chance.choice(("n", "n + 1", "n*n", "(", "", "2", "1/0", "é", "n//0"))
        else:
            dim.dim_value = chance.choice(INTS)


def _odd_tensor(model: ModelProto, chance: random.Random, _: Any) -> None:
    """A stored tensor has another type, other sizes, or odd places in a file."""
    tensors = [m for m in messages(model) if m.DESCRIPTOR.name == "TensorProto"]
    if not tensors:
        return
    tensor = chance.choice(tensors)
    way = chance.randrange(4)
    if way == 0:
        tensor.data_type = chance.choice((*range(0, 30), 99, -1))
    elif way == 1:
        sizes = [chance.choice(INTS) for _ in range(chance.randrange(4))]
        del tensor.dims[:]
        tensor.dims.extend(sizes)
    elif way == 2:
        tensor.data_location = 1
        key = chance.choice(("location", "offset", "length", "checksum", ""))
        tensor.external_data.add(key=key, value=chance.choice((*TEXTS, "weights.bin")))
    else:
        sparse = model.graph.sparse_initializer.add()
        sparse.values.CopyFrom(_copy(tensor))
        sparse.indices.CopyFrom(_copy(chance.choice(tensors)))
        sparse.dims.extend([chance.choice(INTS) for _ in range(chance.randrange(3))])


def _odd_function(model: ModelProto, chance: random.Random, _: Any) -> None:
    """A function calls another, or itself; or a node calls what is none."""
    functions = list(model.functions)
    if not functions:
        made = model.functions.add(name="f", domain="own", input=["a"], output=["b"])
        made.opset_import.extend([helper.make_opsetid("", 18), helper.make_opsetid("own", 1)])
        made.node.append(helper.make_node("Relu", ["a"], ["b"]))
        model.opset_import.append(helper.make_opsetid("own", 1))
        functions = [made]
    function = chance.choice(functions)
    callee = chance.choice(functions)
    caller = chance.choice([*function.node, *_nodes(model)])
    caller.op_type, caller.domain = callee.name, callee.domain


_CHANGES: tuple[Callable[[ModelProto, random.Random, Any], None], ...] = (
    _any_field, _any_field, _any_field, _any_field, _rewire, _other_op, _odd_attribute, _odd_type,
    _odd_tensor, _odd_function,
)  # fmt: skip
