"""Small models whose shapes come from arithmetic with open sizes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

NUMBERS = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "eight": 8}
NUMBERS |= {"ten": 10, "c16": 16, "c20": 20, "c64": 64, "c100": 100, "big": 2**62}
NUMBERS["large"] = 2**22
NUMBERS |= {f"m{n}": -n for n in (1, 3, 5, 8, 256)}
ROWS = 64

ALONE = {
    "without the first": "y = Slice (x, five, big, one)",
    "a shift by one": """
        s = Slice (x, zero, m1, one) p = Constant <value_ints = [0, 1, 0, 0, 0, 0]> ()
        l = Pad (s, p) y = Add (x, l)""",
    "the first apart": """
        f = Slice (x, zero, one, one) r = Slice (x, one, big, one) g = Relu (r)
        c = Concat <axis = 1> (f, g) y = Add (x, c)""",
    "differences": """
        f = Slice (x, zero, one, one) r = Slice (x, one, big, one) s = Slice (x, zero, m1, one)
        d = Sub (r, s) c = Concat <axis = 1> (f, d) y = Mul (x, c)""",
    "halves by slices": """
        h = Div (n, two) a = Slice (x, zero, h, one) y = Relu (a)""",
    "rounded down to eight": """
        q = Div (n, eight) h = Mul (q, eight) a = Slice (x, zero, h, one) y = Neg (a)""",
    "flat and back": """
        p = Mul (b, n) c = Concat <axis = 0> (p, six) f = Reshape (x, c)
        d = Concat <axis = 0> (n, b, six) y = Reshape (f, d)""",
    "a piece of two": """
        k = Constant <value_int = 2> () at = Constant <value_int = 1> ()
        s = SplitToSequence <axis = 1> (x, k) y = SequenceAt (s, at)""",
    "the last piece of three": """
        k = Constant <value_int = 3> () at = Constant <value_int = -1> ()
        s = SplitToSequence <axis = 1> (x, k) y = SequenceAt (s, at)""",
    "space to depth": """
        q = Div (n, two) h = Mul (q, two) s = Slice (x, zero, h, one)
        c = Concat <axis = 0> (b, one, h, six) r = Reshape (s, c)
        y = SpaceToDepth <blocksize = 2> (r)""",
    "without the last": "y = Slice (x, zero, m3, one)",
    "the last ones": "y = Slice (x, m5, big, one)",
    "from a number minus the size": "d = Sub (five, n) y = Slice (x, d, big, one)",
    "from the batch on": "y = Slice (x, b, big, one)",
    "a row from either end": "d = Sub (five, n) i = Max (d, m1) y = Gather <axis = 1> (x, i)",
    "a row by a negative quotient": """
        q = Div (n, three) i = Neg (q) y = Gather <axis = 1> (x, i)""",
    "the middle": "y = Slice (x, five, c100, one)",
    "every third of the first": "y = Slice (x, zero, c20, one, three)",
    "the last ones in reverse": "y = Slice (x, m1, m256, one, m1)",
    "weights of the last": """
        t = Slice (x, m256, big, one)
        s = Softmax <axis = 1> (t)
        p = Mul (s, t)
        y = ReduceSum <keepdims = 0> (p, one)""",
    "a mean of what may be nothing": """
        t = Slice (x, five, big, one)
        y = ReduceMean <keepdims = 0> (t, one)""",
    "a minimum": "e = Min (n, c20) y = Slice (x, zero, e, one)",
    "what exceeds a number": "d = Sub (n, eight) e = Max (d, zero) y = Slice (x, e, big, one)",
    "clipped": """
        low = Constant <value_int = 3> () high = Constant <value_int = 50> ()
        s = Squeeze (n, zero) c = Clip (s, low, high) e = Unsqueeze (c, zero)
        y = Slice (x, zero, e, one)""",
    "chosen if short": "c = Less (n, c20) e = Where (c, n, ten) y = Slice (x, zero, e, one)",
    "chosen if equal": "c = Equal (n, eight) e = Where (c, five, n) y = Slice (x, zero, e, one)",
    "negative quotients": """
        d = Sub (n, c20) e = Div (d, four) a = Abs (e) y = Slice (x, zero, a, one)""",
    "a table of sizes": """
        i = Min (n, ten)
        t = Constant <value_ints = [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]> ()
        e = Gather <axis = 0> (t, i) y = Slice (x, zero, e, one)""",
    "through floats": """
        f = Cast <to = 1> (n) h = Constant <value_floats = [0.5]> () g = Mul (f, h)
        c = Ceil (g) e = Cast <to = 7> (c) y = Slice (x, zero, e, one)""",
    "through half precision": """
        f = Cast <to = 10> (n) h = Cast <to = 7> (f) y = Slice (x, zero, h, one)""",
    "through a product of halves": """
        f = Cast <to = 10> (n) k = Cast <to = 10> (five) g = Mul (f, k) h = Cast <to = 7> (g)
        e = Div (h, eight) y = Slice (x, zero, e, one)""",
    "through bytes": """
        f = Cast <to = 2> (n) h = Cast <to = 7> (f) y = Slice (x, zero, h, one)""",
    "through signed bytes": """
        f = Cast <to = 3> (n) h = Cast <to = 7> (f) y = Slice (x, h, big, one)""",
    "through unsigned sizes": """
        u = Cast <to = 12> (n) k = Cast <to = 12> (c20) d = Sub (u, k) h = Cast <to = 7> (d)
        e = Mod (h, ten) y = Slice (x, zero, e, one)""",
    "through 32 bits": """
        i = Cast <to = 6> (n) k = Cast <to = 6> (large) d = Mul (i, k) h = Cast <to = 7> (d)
        e = Div (h, large) y = Slice (x, zero, e, one)""",
    "a root": """
        f = Cast <to = 1> (n) g = Sqrt (f) e = Cast <to = 7> (g) y = Slice (x, zero, e, one)""",
    "halves swapped": """
        h = Div (n, two) a = Slice (x, zero, h, one) c = Slice (x, h, big, one)
        y = Concat <axis = 1> (c, a)""",
    "halves multiplied": """
        h = Div (n, two) d = Sub (n, h) a = Slice (x, zero, h, one) c = Slice (x, d, big, one)
        y = Mul (a, c)""",
    "parts of any size": """
        o = Add (n, one) h = Div (o, two) e = Sub (n, h) p = Concat <axis = 0> (h, e)
        a, c = Split <axis = 1> (x, p) y = Concat <axis = 1> (c, a)""",
    "padded to blocks": """
        a = Mod (n, eight) c = Sub (eight, a) p = Mod (c, eight)
        q = Concat <axis = 0> (zero, zero, zero, zero, p, zero) t = Pad (x, q)
        s = Concat <axis = 0> (b, m1, eight, six) w = Reshape (t, s) o = Softmax <axis = 2> (w)
        s2 = Concat <axis = 0> (b, m1, six) r = Reshape (o, s2) y = Slice (r, zero, n, one)""",
    "reflected to an even size": """
        p = Mod (n, two) q = Concat <axis = 0> (zero, zero, zero, zero, p, zero)
        t = Pad <mode = "reflect"> (x, q) y = ReduceMean <keepdims = 0> (t, one)""",
    "padded to a size": """
        d = Sub (c64, n) p = Max (d, zero) q = Concat <axis = 0> (zero, zero, zero, zero, p, zero)
        y = Pad (x, q)""",
    "resized to an even size": """
        h = Div (n, two) e = Mul (h, two) r = Resize <mode = "linear", axes = [1]> (x, , , e)
        y = ReduceMean <keepdims = 0> (r, one)""",
    "cropped to an even size": """
        h = Div (n, two) e = Mul (h, two) t = CenterCropPad <axes = [1]> (x, e)
        y = ReduceSum <keepdims = 0> (t, one)""",
    "cropped or padded to a size": "y = CenterCropPad <axes = [1]> (x, c20)",
    "up after down": """
        t = Transpose <perm = [0, 2, 1]> (x) d = MaxPool <kernel_shape = [2], strides = [2]> (t)
        s = Constant <value_floats = [1.0, 1.0, 2.0]> () u = Resize <mode = "nearest"> (d, , s)
        l = Shape <start = 2> (u) e = Sub (n, l)
        q = Concat <axis = 0> (zero, zero, zero, zero, zero, e) w = Pad (u, q) y = Add (t, w)""",
    "cropped to what went down": """
        t = Transpose <perm = [0, 2, 1]> (x)
        d = AveragePool <kernel_shape = [2], strides = [2]> (t)
        s = Constant <value_floats = [1.0, 1.0, 2.0]> () u = Resize <mode = "nearest"> (d, , s)
        l = Shape <start = 2> (u) v = Slice (t, zero, l, two) y = Add (v, u)""",
    "positions": "t = Slice (table, zero, n, zero) y = Add (x, t)",
    "rows of a table": """
        t = Slice (table, zero, n, zero) s = ReduceSum <keepdims = 0> (t, zero) y = Add (x, s)""",
    "rows around the middle": """
        g = Sub (c64, n) m = Max (g, zero) e = Add (m, n) t = Slice (table, m, e, zero)
        s = ReduceMax <keepdims = 0> (t, zero) y = Add (x, s)""",
    "every third position": """
        z = Squeeze (zero, zero) l = Squeeze (n, zero) s = Squeeze (three, zero)
        r = Range (z, l, s) y = Gather <axis = 1> (x, r)""",
    "repeated": "e = Min (n, three) r = Concat <axis = 0> (one, e, one) y = Tile (x, r)",
    "the largest ones": "e = Min (n, five) v, i = TopK <axis = 1> (x, e) y = Identity (v)",
    "the largest five": "v, i = TopK <axis = 1> (x, five) y = Identity (v)",
    "a scale by the size": "m = Max (n, c20) f = Cast <to = 1> (m) y = Div (x, f)",
    "rolled": """
        a = Slice (x, three, big, one) c = Slice (x, zero, three, one)
        y = Concat <axis = 1> (a, c)""",
    "shifted": """
        a = Slice (x, zero, m1, one) c = Slice (x, zero, one, one)
        y = Concat <axis = 1> (c, a)""",
    "of the batch": "y = Slice (x, zero, two, zero)",
    "convolved, flattened and restored": """
        t = Transpose <perm = [0, 2, 1]> (x) c = Conv <strides = [2]> (t, kernel)
        f = Constant <value_ints = [0, -1]> () l = Reshape (c, f) e = Tanh (l)
        s = Shape (c) r = Reshape (e, s) y = Conv <pads = [1, 1]> (r, kernel)""",
    "pooled, with some rows twice": """
        e = Min (n, b) h = Slice (x, zero, e, one) t = Concat <axis = 1> (x, h)
        u = Transpose <perm = [0, 2, 1]> (t)
        y = MaxPool <kernel_shape = [3], strides = [2], pads = [1, 1]> (u)""",
}
"""Bodies that compute `y` from `x` (float, [B, N, 6]), by what they do; `b` and `n` are B and N."""

WITH_PAST = {
    "a window": """
        c = Concat <axis = 1> (past, x) w = Slice (c, m8, big, one)
        t = Transpose <perm = [0, 2, 1]> (w) s = MatMul (x, t) p = Softmax <axis = -1> (s)
        y = MatMul (p, w)""",
    "what overflows": """
        c = Concat <axis = 1> (past, x) l = Shape <start = 1, end = 2> (c)
        d = Sub (l, c64) e = Max (d, zero) y = Slice (c, e, big, one)""",
    "the second half of both": """
        c = Concat <axis = 1> (x, past) l = Shape <start = 1, end = 2> (c) h = Div (l, two)
        y = Slice (c, h, big, one)""",
    "the shorter": """
        l = Shape <start = 1, end = 2> (past) e = Min (n, l) p = Slice (past, zero, e, one)
        q = Slice (x, zero, e, one) y = Mul (p, q)""",
}
"""Bodies that also read `past`, [B, M, 6]."""


def size_model(what: str) -> onnx.ModelProto:
    """The model with the body of that name."""
    ports = "float[B, N, 6] x" + (", float[B, M, 6] past" if what in WITH_PAST else "")
    numbers = " ".join(f"{k} = Constant <value_ints = [{v}]> ()" for k, v in NUMBERS.items())
    sizes = "b = Shape <start = 0, end = 1> (x) n = Shape <start = 1, end = 2> (x)"
    body = (ALONE | WITH_PAST)[what]
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> sizes ({ports}) => (float y) '
        f"{{ {numbers} {sizes} {body} }}"
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    if "table" in body:
        rows = np.random.default_rng(0).standard_normal((ROWS, 6)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(rows, "table"))
    if "kernel)" in body:
        kernel = np.random.default_rng(1).standard_normal((6, 6, 3)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(kernel, "kernel"))
    return model
