"""Random models whose tensors have sizes that they compute from open sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

OPS = ("Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Neg", "Abs", "Clip", "Less", "Where")


def random_sizes(source: random.Random) -> str:
    """A body that computes integers t2 to t11 from the first two sizes of `x`, and from `big`."""
    lines = ["t0 = Shape <start = 0, end = 1> (x)", "t1 = Shape <start = 1, end = 2> (x)"]
    for i in range(2, 12):
        a, b, c = (f"t{source.randrange(i)}" for _ in range(3))
        op = source.choice(OPS)
        number = source.choice([-5, -1, 1, 2, 3, 4, 7, 8, 20, 64])
        lines.append(f"c{i} = Constant <value_ints = [{number}]> ()")
        match op:
            case "Neg" | "Abs":
                lines.append(f"t{i} = {op} ({a})")
            case "Div" | "Mod":
                lines.append(f"t{i} = {op} ({a}, c{i})")
            case "Clip":
                lines += [f"k{i} = Constant <value_int = {number}> ()", f"s{i} = Squeeze ({a})"]
                lines += [f"r{i} = Clip (s{i}, k{i}, big)", f"t{i} = Reshape (r{i}, one)"]
            case "Less" | "Where":
                lines.append(f"l{i} = Less ({a}, {source.choice([b, f'c{i}'])})")
                lines.append(f"t{i} = Where (l{i}, {b}, {c})")
            case _:
                lines.append(f"t{i} = {op} ({a}, {source.choice([b, f'c{i}'])})")
    return "\n".join(lines)


NUMBERS = {"zero": 0, "one": 1, "two": 2, "three": 3, "five": 5, "m1": -1, "m4": -4, "end": 2**62}
STEPS = 4
"""Most steps of a model."""


def random_model(source: random.Random) -> onnx.ModelProto:
    """A model of x [B, N, 6], whose steps cut, pad, join, repeat and reshape along N, or compute
    something, by sizes of `random_sizes`."""
    lines = [random_sizes(source), "f0 = Identity (x)"]
    count = source.randint(1, STEPS)
    for i in range(count):
        lines += _step(source, f"f{i}", f"f{i + 1}", f"u{i}", i)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        random (float[B, N, 6] x) => (float[b, n, 6] f{count}) {{
            big = Constant <value_int = 1000000> ()
            {chr(10).join(lines)}
        }}"""
    )
    stored = {name: np.array([value]) for name, value in NUMBERS.items()}
    weights = np.random.default_rng(0)
    stored |= {"w": weights.standard_normal((6, 6), np.float32) / 2}
    stored |= {"k": weights.standard_normal((6, 1, 3), np.float32) / 2}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in stored.items() if name in read
    )
    return model


def _step(source: random.Random, x: str, y: str, u: str, i: int) -> Iterator[str]:
    """The nodes from `x` to `y`; names of other results begin with `u`."""
    a, b = (f"t{source.randrange(12)}" for _ in range(2))
    yield f"{u}s = Shape <start = 1, end = 2> ({x})"
    clipped = f"{u}m = Max ({a}, zero) {u}p = Min ({u}m, five)"
    match source.randrange(14):
        case 0:
            yield f"{y} = Slice ({x}, {a}, {b}, one)"
        case 1:
            yield f"{y} = Slice ({x}, {a}, end, one)"
        case 2:
            yield f"{y} = Slice ({x}, zero, {a}, one, {source.choice(['two', 'three'])})"
        case 3:
            yield f"{u}l = Neg ({u}s) {u}m = Sub ({u}l, one) {y} = Slice ({x}, m1, {u}m, one, m1)"
        case 4:
            yield f"{clipped} {u}q = Concat <axis = 0> (zero, zero, zero, zero, {u}p, zero)"
            yield f"{y} = Pad ({x}, {u}q)"
        case 5:
            yield f"{u}c = Slice ({x}, {a}, {b}, one)"
            yield f"{y} = Concat <axis = 1> ({x}, {u}c)"
        case 6:
            yield f"{u}h = Div ({u}s, two) {u}a = Slice ({x}, zero, {u}h, one)"
            yield f"{u}c = Slice ({x}, {u}h, end, one) {y} = Concat <axis = 1> ({u}c, {u}a)"
        case 7:
            yield f"{u}h = Div ({u}s, three) {u}e = Mul ({u}h, three)"
            yield f"{u}c = Slice ({x}, zero, {u}e, one) {u}b = Shape <start = 0, end = 1> ({x})"
            yield f"{u}d = Constant <value_ints = [3, 6]> ()"
            yield f"{u}o = Concat <axis = 0> ({u}b, {u}h, {u}d)"
            yield f"{u}r = Reshape <allowzero = 1> ({u}c, {u}o)"
            yield f"{y} = ReduceMax <keepdims = 0> ({u}r, two)"
        case 8:
            yield f"{y} = MatMul ({x}, w)"
        case 9:
            yield f"{u}n = Softmax <axis = 1> ({x}) {y} = Mul ({x}, {u}n)"
        case 10:
            yield f"{u}n = CumSum ({x}, one) {y} = Tanh ({u}n)"
        case 11:
            yield f"{u}z = Squeeze (zero) {u}o = Squeeze (one) {u}n = Squeeze ({u}s)"
            yield f"{u}r = Range ({u}z, {u}n, {u}o) {u}f = Cast <to = 1> ({u}r)"
            yield f"{u}v = Sin ({u}f) {u}w = Unsqueeze ({u}v, one) {y} = Add ({x}, {u}w)"
        case 12:
            yield f"{u}l = Less ({a}, {u}s) {u}k = Relu ({x}) {y} = Where ({u}l, {u}k, {x})"
        case 13:
            yield f"{u}t = Transpose <perm = [0, 2, 1]> ({x})"
            yield f"{u}c = Conv <group = 6, pads = [1, 1]> ({u}t, k)"
            yield f"{y} = Transpose <perm = [0, 2, 1]> ({u}c)"
