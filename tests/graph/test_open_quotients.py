"""Open sizes that are divided: readers of text, images that are halved, waveforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, check_outputs, options, run_unsplit
from onnx import TensorProto, helper, numpy_helper
from small_models import write_text

import onnxpar
from onnxpar.base.errors import InputError, OnnxparError, StrategyError
from onnxpar.planner import sharder
from onnxpar.runtime.session.threads import ThreadSession

Shapes = Sequence[Mapping[str, Sequence[int]]]
LAYOUTS = ["2", "data-parallel 2", "tensor-parallel 2", "tensor-parallel 3"]


def weight(name: str, *shape: int) -> TensorProto:
    """Small random weights, the same for each name."""
    source = np.random.default_rng(sum(map(ord, name)))
    return numpy_helper.from_array(
        (source.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), name
    )


def save(path: Path, text: str, *weights: TensorProto) -> Path:
    """A model of opset 17 from the text of its graph."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    model.graph.initializer.extend(weights)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def check(model: Path, par: Path, layout: str, shapes: Shapes, **asked: object) -> str:
    """Compares with the unsplit model at each of the shapes; returns the plan's text."""
    plan = sharder.shard(model, par, options(layout, **asked))  # type: ignore[arg-type]
    source = np.random.default_rng(0)
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for shape in shapes:
            feeds = {k: source.standard_normal(v).astype(np.float32) for k, v in shape.items()}
            wanted = run_unsplit(model, feeds)
            check_outputs(session.run(None, feeds), wanted, [p.name for p in plan.outputs])
    return plan.text()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three strides along the width, a pool that rounds up, an LSTM and attention over what is left
    of it."""
    return save(
        tmp_path_factory.mktemp("reader") / "reader.onnx",
        """
        reader (float[batch, 3, 16, width] x) => (float[n, t, 24] y, float[n, t, u] scores) {
            a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, k1)
            b = Relu (a)
            c = MaxPool <kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1> (b)
            d = Conv <strides = [2, 1], pads = [1, 0, 1, 0]> (c, k2)
            e = HardSwish (d)
            f = AveragePool <kernel_shape = [2, 3], strides = [2, 3]> (e)
            axes = Constant <value_ints = [2]> ()
            g = Squeeze (f, axes)
            h = Transpose <perm = [2, 0, 1]> (g)
            l, last, cell = LSTM <hidden_size = 12> (h, lw, lr)
            one = Constant <value_ints = [1]> ()
            m = Squeeze (l, one)
            q = Transpose <perm = [1, 0, 2]> (m)
            sizes = Shape (q)
            zero = Constant <value_int = 0> ()
            first = Constant <value_int = 1> ()
            bn = Gather (sizes, zero)
            tn = Gather (sizes, first)
            bs = Unsqueeze (bn, start)
            ts = Unsqueeze (tn, start)
            rest = Constant <value_ints = [3, 4]> ()
            target = Concat <axis = 0> (bs, ts, rest)
            heads = Reshape (q, target)
            qh = Transpose <perm = [0, 2, 1, 3]> (heads)
            kh = Transpose <perm = [0, 2, 3, 1]> (heads)
            s = MatMul (qh, kh)
            p = Softmax (s)
            o = MatMul (p, qh)
            back = Transpose <perm = [0, 2, 1, 3]> (o)
            twelve = Constant <value_ints = [12]> ()
            flat = Concat <axis = 0> (bs, ts, twelve)
            z = Reshape (back, flat)
            y = MatMul (z, head)
            scores = ReduceMean <axes = [1], keepdims = 0> (p)
        }
        """,
        weight("k1", 8, 3, 3, 3),
        weight("k2", 12, 8, 3, 3),
        weight("lw", 1, 48, 12),
        weight("lr", 1, 48, 12),
        weight("head", 12, 24),
        numpy_helper.from_array(np.array([0]), "start"),
    )


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_of_text_run_at_any_width(reader: Path, layout: str, tmp_path: Path) -> None:
    shapes = [{"x": (3 + w % 3, 3, 16, w)} for w in (24, 25, *range(60, 73), 201)]
    text = check(reader, tmp_path / "m.par", layout, shapes)
    assert "width" in text and "//" in text


@pytest.mark.slow
def test_a_width_is_split_across_strides(reader: Path, tmp_path: Path) -> None:
    shapes = [{"x": (2, 3, 16, w)} for w in (60, 61, 62, 63, 64, 65, 66, 67)]
    strategy = {"tensors": {"x": [None, None, None, "tp"]}}
    text = check(reader, tmp_path / "m.par", "tp=2", shapes, strategy=strategy)
    assert text.count('"HaloExchange"') > 2


def test_a_height_that_a_node_limits(tmp_path: Path) -> None:
    """The pool must leave one row: heights from 4 to 7."""
    model = save(
        tmp_path / "rows.onnx",
        """
        rows (float[batch, 3, height, width] x) => (float[n, 6, 1, w] y) {
            a = AveragePool <kernel_shape = [4, 1], strides = [4, 1]> (x)
            b = ReduceMax <axes = [2]> (x)
            y = Concat <axis = 1> (a, b)
        }
        """,
    )
    shapes = [{"x": (4, 3, h, 9)} for h in (4, 5, 7)]
    text = check(model, tmp_path / "m.par", "data-parallel 2", shapes)
    assert "width" in text
    with (
        ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session,
        pytest.raises(OnnxparError, match="needs height <= 7"),
    ):
        session.run(None, {"x": np.zeros((4, 3, 8, 9), np.float32)})


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A U-Net that resizes to the shape of what it skips, and one whose sizes pass through
    floats."""
    return save(
        tmp_path_factory.mktemp("unet") / "resized.onnx",
        """
        unet (float[batch, 3, height, width] x) => (float[n, 4, a, b] y, float[n, 6, c, d] z) {
            d1 = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, k1)
            d2 = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (d1, k2)
            d3 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d2)
            s2 = Shape (d2)
            u2 = Resize <mode = "nearest"> (d3, , , s2)
            j2 = Concat <axis = 1> (u2, d2)
            s1 = Shape <start = 2> (d1)
            bc = Constant <value_ints = [-1]> ()
            twelve = Constant <value_ints = [12]> ()
            n = Shape <start = 0, end = 1> (d1)
            t1 = Concat <axis = 0> (n, twelve, s1)
            u1 = Resize <mode = "nearest"> (j2, , , t1)
            m1 = Conv <pads = [1, 1, 1, 1]> (u1, k3)
            y = Add (m1, d1)
            hw = Shape <start = 2> (x)
            hwf = Cast <to = 1> (hw)
            half = Constant <value_floats = [0.5]> ()
            hh = Mul (hwf, half)
            fl = Floor (hh)
            ints = Cast <to = 7> (fl)
            target = Concat <axis = 0> (n, twelve, ints)
            r = Resize <mode = "nearest"> (j2, , , target)
            z = Conv (r, k4)
        }
        """,
        weight("k1", 4, 3, 3, 3),
        weight("k2", 6, 4, 3, 3),
        weight("k3", 4, 12, 3, 3),
        weight("k4", 6, 12, 1, 1),
    )


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["2", "data-parallel 3", "tensor-parallel 2"])
def test_images_are_resized_to_what_they_skip(resized: Path, layout: str, tmp_path: Path) -> None:
    sizes = [(33, 32), (34, 35), (36, 37), (39, 38), (40, 64)]
    shapes = [{"x": (4, 3, h, w)} for h, w in sizes]
    check(resized, tmp_path / "m.par", layout, shapes)


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A U-Net that doubles what it has halved, so that sizes must be multiples of 4."""
    return save(
        tmp_path_factory.mktemp("unet") / "doubled.onnx",
        """
        unet (float[batch, 3, height, width] x) => (float[n, 4, a, b] y) {
            d1 = Conv <pads = [1, 1, 1, 1]> (x, k1)
            d2 = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (d1, k2)
            d3 = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (d2, k3)
            u2 = ConvTranspose <strides = [2, 2]> (d3, t3)
            j2 = Concat <axis = 1> (u2, d2)
            u1 = ConvTranspose <strides = [2, 2]> (j2, t2)
            y = Add (u1, d1)
        }
        """,
        weight("k1", 4, 3, 3, 3),
        weight("k2", 6, 4, 3, 3),
        weight("k3", 6, 6, 3, 3),
        weight("t3", 6, 6, 2, 2),
        weight("t2", 12, 4, 2, 2),
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2", "tensor-parallel 2"])
def test_sizes_must_be_multiples(doubled: Path, layout: str, tmp_path: Path) -> None:
    shapes = [{"x": (3, 3, h, w)} for h, w in ((16, 20), (24, 16), (28, 36))]
    text = check(doubled, tmp_path / "m.par", layout, shapes)
    assert "4*width_by_4" in text
    feeds = {"x": np.zeros((3, 3, 16, 18), np.float32)}
    with (
        ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session,
        pytest.raises(InputError, match=r"4\*width_by_4"),
    ):
        session.run(None, feeds)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["2", "data-parallel 3", "tensor-parallel 2"])
def test_waveforms_of_any_length(layout: str, tmp_path: Path) -> None:
    """Hops of 160: at small samples the length would look constant."""
    model = save(
        tmp_path / "wave.onnx",
        """
        wave (float[batch, length] x) => (float[n, t, 8] y) {
            one = Constant <value_ints = [1]> ()
            c = Unsqueeze (x, one)
            f = Conv <strides = [160], kernel_shape = [400]> (c, k1)
            g = Relu (f)
            h = Conv <strides = [2], pads = [1, 1]> (g, k2)
            i = Transpose <perm = [0, 2, 1]> (h)
            q = MatMul (i, w1)
            kt = Transpose <perm = [0, 2, 1]> (q)
            s = MatMul (q, kt)
            p = Softmax (s)
            y = MatMul (p, q)
        }
        """,
        weight("k1", 12, 1, 400),
        weight("k2", 12, 12, 3),
        weight("w1", 12, 8),
    )
    lengths = (1040, 1199, 1200, 1359, 1360, 1361, 3210)
    check(model, tmp_path / "m.par", layout, [{"x": (3, n)} for n in lengths])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_frames_of_a_signal_of_any_length(ranks: int, tmp_path: Path) -> None:
    """Ranks fetch the ends of their frames, but gather a signal that may have a single one."""
    model = save(
        tmp_path / "frames.onnx",
        """
        frames (float[batch, length, 1] x) => (float[batch, t, f, 2] y) {
            step = Constant <value_int = 160> ()
            size = Constant <value_int = 400> ()
            y = STFT <onesided = 1> (x, step, , size)
        }""",
    )
    shapes = [{"x": (2, n, 1)} for n in (1040, 1199, 1200, 1359, 1360, 1361, 3210)]
    how = {"strategy": {"tensors": {"x": [None, "tp", None]}}}
    assert "AllGather" in check(model, tmp_path / "m.par", f"tp={ranks}", shapes, **how)
    fixed = {**how, "dims": {"length": 3210}}
    text = check(model, tmp_path / "n.par", f"tp={ranks}", shapes[-1:], **fixed)
    assert "NeighborExchange" in text and "AllGather" not in text


def test_a_size_that_only_looks_constant_is_none(tmp_path: Path) -> None:
    """No more than 64 columns are kept, which small samples do not tell."""
    model = save(
        tmp_path / "cut.onnx",
        """
        cut (float[batch, width] x) => (float[n, m] y) {
            zero = Constant <value_ints = [0]> ()
            end = Constant <value_ints = [64]> ()
            axis = Constant <value_ints = [1]> ()
            a = Slice (x, zero, end, axis)
            n = Shape (a)
            b = Reshape (a, n)
            y = Relu (b)
        }
        """,
    )
    shapes = [{"x": (4, w)} for w in (3, 30, 63, 64, 65, 200)]
    check(model, tmp_path / "m.par", "data-parallel 2", shapes)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide windows over an image, windows side by side, and windows over what is left."""
    return save(
        tmp_path_factory.mktemp("windows") / "windowed.onnx",
        """
        windowed (float[batch, 3, height, width] x) => (float[n, 4, h, w] y) {
            a = Conv <pads = [3, 3, 3, 3]> (x, k1)
            b = Relu (a)
            c = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
            y = Conv <pads = [1, 1, 1, 1]> (c, k2)
        }
        """,
        weight("k1", 4, 3, 7, 7),
        weight("k2", 4, 4, 3, 3),
    )


IMAGES = [(1, 3, 16, 12), (1, 3, 2, 12), (2, 3, 12, 3), (1, 3, 2, 2), (3, 3, 7, 9)]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("axis", [2, 3])
def test_parts_may_be_smaller_than_windows(
    windowed: Path, axis: int, ranks: int, tmp_path: Path
) -> None:
    """No rank's neighbours have what its windows reach in a small image: others do."""
    strategy = {"tensors": {"x": ["tp" if i == axis else None for i in range(4)]}}
    shapes = [{"x": shape} for shape in IMAGES]
    text = check(windowed, tmp_path / "m.par", f"tp={ranks}", shapes, strategy=strategy)
    assert "HaloExchange" in text and "while sizes are open" not in text


WINDOWS = {
    "stride 1": "Conv <pads = [0, 1, 0, 1]> (x, k3)",
    "wide": "Conv <pads = [0, 3, 0, 3]> (x, k7)",
    "dilated": "Conv <pads = [0, 2, 0, 2], dilations = [1, 2]> (x, k3)",
    "same": 'Conv <auto_pad = "SAME_UPPER"> (x, k3)',
    "stride 2": "Conv <pads = [0, 1, 0, 1], strides = [1, 2]> (x, k3)",
    "stride 3 with gaps": "Conv <pads = [0, 1, 0, 0], strides = [1, 3]> (x, k2)",
    "stride 5": "Conv <pads = [0, 3, 0, 3], strides = [1, 5]> (x, k7)",
    "largest": "MaxPool <kernel_shape = [1, 3], pads = [0, 1, 0, 1]> (x)",
    "largest of pairs": "MaxPool <kernel_shape = [1, 2], strides = [1, 2], ceil_mode = 1> (x)",
    "norm": "LpPool <kernel_shape = [1, 3], pads = [0, 1, 0, 1], strides = [1, 2]> (x)",
    "mean": "AveragePool <kernel_shape = [1, 3], pads = [0, 1, 0, 1], count_include_pad = 1> (x)",
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("windows", WINDOWS)
def test_windows_over_parts_of_any_width(windows: str, ranks: int, tmp_path: Path) -> None:
    """Of widths from 1 on: ranks have parts smaller than windows, or none, and some read what
    farther ranks have."""
    model = save(
        tmp_path / "any.onnx",
        f"""
        any (float[1, 2, 2, width] x) => (float[n, c, h, w] y) {{
            [node] a = {WINDOWS[windows]}
            y = Sigmoid (a)
        }}
        """,
        *(weight(f"k{n}", 3, 2, 1, n) for n in (2, 3, 7) if f"k{n})" in WINDOWS[windows]),
    )
    strategy = {"shard": {"node": [[1, 1, 1, "tp"]]}}
    shapes = [{"x": (1, 2, 2, width)} for width in range(1, 41)]
    text = check(model, tmp_path / "m.par", f"tp={ranks}", shapes, strategy=strategy)
    assert '"HaloExchange"' in text


def test_lengths_end_with_the_table(tmp_path: Path) -> None:
    """Longer ones are refused by the model, and by name."""
    model = save(
        tmp_path / "table.onnx",
        """
        table (float[batch, 1, seq] x) => (float[batch, 1, seq] y, float[n, 1, half] z) {
            s = Shape <start = 2> (x)
            zero = Constant <value = int64[1] {0}> ()
            rows = Slice (table, zero, s)
            y = Add (x, rows)
            z = MaxPool <kernel_shape = [2], strides = [2]> (x)
        }
        """,
        weight("table", 15),
    )
    shapes = [{"x": (3, 1, n)} for n in (2, 3, 8, 9, 14, 15)]
    check(model, tmp_path / "m.par", "tp=2", shapes)
    with (
        ThreadSession(tmp_path / "m.par") as session,
        pytest.raises(
            InputError, match=r"needs seq <= 15, and the run has seq=16; .* --dim seq=16"
        ),
    ):
        session.run(None, {"x": np.zeros((3, 1, 16), np.float32)})


@pytest.mark.slow
def test_height_and_width_are_both_split(windowed: Path, tmp_path: Path) -> None:
    """Corners come with the second exchange."""
    strategy = {"tensors": {"x": [None, None, "a", "b"]}}
    shapes = [{"x": shape} for shape in IMAGES]
    text = check(windowed, tmp_path / "m.par", "a=2,b=2", shapes, strategy=strategy)
    assert text.count('"HaloExchange"') == 6


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_smaller_than_windows(windowed: Path, layout: str, tmp_path: Path) -> None:
    check(windowed, tmp_path / "m.par", layout, [{"x": shape} for shape in IMAGES])


def test_a_known_height_is_exchanged_beside_open_sizes(windowed: Path, tmp_path: Path) -> None:
    strategy = {"tensors": {"x": [None, None, "tp", None]}}
    shapes = [{"x": (b, 3, 16, w)} for b, w in ((1, 2), (2, 9), (3, 40))]
    how = {"strategy": strategy, "dims": {"height": 16}}
    assert "NeighborExchange" in check(windowed, tmp_path / "m.par", "tp=2", shapes, **how)


@pytest.mark.matrix
@pytest.mark.parametrize(("width", "ranks"), [(2, 2), (2, 3), (4, 3), (4, 5)])
def test_windows_side_by_side_over_empty_parts(width: int, ranks: int, tmp_path: Path) -> None:
    """The heights sampled are steps apart that may be the number of ranks; those fed are not."""
    model = save(
        tmp_path / "pool.onnx",
        f"""
        pool (float[batch, 3, height, 2] x) => (float[n, 3, h, 2] y) {{
            a = Relu (x)
            b = MaxPool <kernel_shape = [{width}, 1], strides = [{width}, 1]> (a)
            y = Sigmoid (b)
        }}
        """,
    )
    strategy = {"tensors": {"x": [None, None, "tp", None]}}
    shapes = [{"x": (2, 3, height, 2)} for height in range(width, 25)]
    check(model, tmp_path / "m.par", f"tp={ranks}", shapes, strategy=strategy)


@pytest.mark.slow
def test_windows_that_line_up_at_all_sizes(tmp_path: Path) -> None:
    """Heights are multiples of 4, so that pairs of rows never lie on two ranks."""
    model = save(
        tmp_path / "pairs.onnx",
        """
        pairs (float[batch, 3, height, 2] x) => (float[n, 3, height, 2] y) {
            a = MaxPool <kernel_shape = [2, 1], strides = [2, 1]> (x)
            b = MaxPool <kernel_shape = [2, 1], strides = [2, 1]> (a)
            c = ConvTranspose <strides = [4, 1], group = 3> (b, k)
            y = Add (c, x)
        }
        """,
        weight("k", 3, 1, 4, 1),
    )
    strategy = {"tensors": {"x": [None, None, "tp", None]}}
    for ranks in (2, 3):
        shapes = [{"x": (2, 3, 4 * n, 2)} for n in range(1, 8)]
        check(model, tmp_path / f"{ranks}.par", f"tp={ranks}", shapes, strategy=strategy)


@pytest.mark.matrix
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("target", ["0, 0, 2, 8", "0, -1, 2, 8", "-1, 2, 8", "2, -1, 16", "-1, 16"])
def test_a_past_of_nothing_is_reshaped(target: str, opset: int, axis: int, tmp_path: Path) -> None:
    """A size of 0 in a rank's own shape is none, also where an operand's would be copied, and
    beside a part of the batch that is empty."""
    sizes = ", ".join("abcd"[: target.count(",") + 1])
    model = tmp_path / "past.onnx"
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
        past (float[batch, past, 16] old) => (float[{sizes}] y) {{
            target = Constant <value_ints = [{target}]> ()
            heads = Reshape (old, target)
            y = Relu (heads)
        }}"""
    onnx.save(onnx.parser.parse_model(text), model)
    strategy = {"tensors": {"old": ["tp" if i == axis else None for i in range(3)]}}
    pasts = (5, 0) if axis != 1 else (5, 1)
    shapes = [{"old": (batch, past, 16)} for batch in (4, 1, 2) for past in pasts]
    shapes = [s for s in shapes if "2, -1" not in target or s["old"][0] * s["old"][1] % 2 == 0]
    check(model, tmp_path / "m.par", "tp=2", shapes, strategy=strategy)


def bucketed(path: Path, opset: int, batch: int | str) -> Path:
    """Two sums over parts of one row, with the batch as the second dimension, and what is made of
    them."""
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
        bucketed (float[4, {batch}, 8] x) => (float[4, n, 8] y, float[4, m, 4] z) {{
            y = MatMul (x, w1)
            z = MatMul (x, w2)
        }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend([weight("w1", 8, 8), weight("w2", 8, 4)])
    onnx.save(model, path)
    return path


@pytest.mark.matrix
@pytest.mark.parametrize("batch", ["batch", 2])
@pytest.mark.parametrize("last", [None, "tp"])
@pytest.mark.parametrize("opset", [13, 17])
def test_buckets_with_empty_parts(
    opset: int, last: str | None, batch: int | str, tmp_path: Path
) -> None:
    """Sums that are reduced together, or reduced and scattered, where ranks have no samples."""
    model = bucketed(tmp_path / "sums.onnx", opset, batch)
    dims: dict[str, list[str | None]] = {"x": [None, "dp", "tp"], "w1": ["tp", None]}
    dims |= {"w2": ["tp", None], "y": [None, "dp", last], "z": [None, "dp", last]}
    how = replace(options("dp=3,tp=2", strategy={"tensors": dims}), fusion="size")
    plan = sharder.shard(model, tmp_path / "m.par", how)
    if last is None or batch == 2:
        assert [c.tensor for c in plan.collectives] == ["y z"]
    source = np.random.default_rng(0)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for rows in (1, 2, 3, 4) if batch == "batch" else (2,):
            feeds = {"x": source.standard_normal((4, rows, 8)).astype(np.float32)}
            wanted = run_unsplit(model, feeds)
            check_outputs(session.run(None, feeds), wanted, [p.name for p in plan.outputs])


@pytest.mark.parametrize("best", [1, 2, 5])
@pytest.mark.parametrize("rows", ["N", "M"])
def test_the_best_of_few_rows(best: int, rows: str, tmp_path: Path) -> None:
    """Ranks have fewer rows than are asked for, or none; M rows are 3 N."""
    whole = "r = Concat<axis = 1>(x, x, x)" if rows == "M" else "r = Identity(x)"
    text = f"g (float[B,N,2] x) => (float[B,K,2] v, int64[B,K,2] i) <int64[1] k = {{{best}}}>"
    model = save(tmp_path / "m.onnx", f"{text} {{ {whole} v, i = TopK<axis = 1>(r, k) }}")
    split = {"r": [None, "tp", None]}
    sharder.shard(model, tmp_path / "m.par", options("tp=3", strategy={"tensors": split}))
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for size in (1, 2, 3, 5, 7, 20):
            if size * (3 if rows == "M" else 1) < best:
                continue
            x = np.random.default_rng(size).standard_normal((2, size, 2)).astype(np.float32)
            for found, wanted in zip(
                session.run(None, {"x": x}), run_unsplit(model, {"x": x}), strict=True
            ):
                np.testing.assert_array_equal(found, wanted)


def branches(path: Path) -> Path:
    """An If whose branches call different weights by one name, which read what is around them."""

    def branch(scale: float) -> onnx.GraphProto:
        kernel = numpy_helper.from_array(
            (numpy_helper.to_array(weight("k", 6, 4, 3)) * scale).astype(np.float32), "kernel"
        )
        node = helper.make_node("Conv", ["e", "kernel"], [f"r{scale}"], pads=[1, 1])
        out = helper.make_tensor_value_info(f"r{scale}", TensorProto.FLOAT, ["n", 6, "t"])
        return helper.make_graph([node], "branch", [], [out], [kernel])

    def port(name: str, kind: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    nodes = [
        helper.make_node("Unsqueeze", ["x", "axis"], ["c"]),
        helper.make_node("Conv", ["c", "k1"], ["d"], strides=[128], kernel_shape=[256]),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("Greater", ["rate", "limit"], ["fast"]),
        helper.make_node("If", ["fast"], ["y"], then_branch=branch(1.0), else_branch=branch(2.0)),
    ]
    graph = helper.make_graph(
        nodes,
        "voice",
        [
            port("x", TensorProto.FLOAT, ["batch", "length"]),
            port("rate", TensorProto.INT64, []),
        ],
        [port("y", TensorProto.FLOAT, ["n", 6, "t"])],
        [
            weight("k1", 4, 1, 256),
            numpy_helper.from_array(np.array([1]), "axis"),
            numpy_helper.from_array(np.array(8000), "limit"),
        ],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["2", "data-parallel 2", "tensor-parallel 3"])
def test_branches_read_what_is_around_them(layout: str, tmp_path: Path) -> None:
    model = branches(tmp_path / "voice.onnx")
    plan = sharder.shard(model, tmp_path / "m.par", options(layout))
    whole = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for rate in (8000, 16000):
            for length in (512, 576, 640, 1151):
                x = np.random.default_rng(rate).standard_normal((3, length)).astype(np.float32)
                feeds = {"x": x, "rate": np.array(rate)}
                names = [p.name for p in plan.outputs]
                check_outputs(session.run(None, feeds), whole.run(None, feeds), names)


def test_sizes_that_nothing_tells_are_named(tmp_path: Path) -> None:
    """A flattened image times a matrix: 48 may be 6 times 8 or 4 times 12."""
    model = save(
        tmp_path / "flat.onnx",
        """
        flat (float[batch, 3, height, width] x) => (float[n, 5] y) {
            p = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x)
            f = Flatten (p)
            y = MatMul (f, w)
        }
        """,
        weight("w", 48, 5),
    )
    with pytest.raises(StrategyError, match=r"MatMul.*48.*--dim height=N"):
        sharder.shard(model, tmp_path / "m.par", options("data-parallel 2"))
    how = options("data-parallel 2", dims={"height": 8, "width": 8})
    sharder.shard(model, tmp_path / "m.par", how)


def tied(path: Path) -> Path:
    """What torch's exporter makes of Dim.DYNAMIC: a symbol for every dimension."""
    return save(
        path,
        """
        tied (float[s2, s18, 8] x, float[s74, s5, 8] z) => (float[a, b, c] y) {
            sum = Add (x, z)
            y = MatMul (sum, w)
        }
        """,
        weight("w", 8, 6),
    )


@pytest.mark.parametrize("layout", ["2", "data-parallel 3", "tensor-parallel 2"])
def test_symbols_that_must_be_equal_are_one(layout: str, tmp_path: Path) -> None:
    model = tied(tmp_path / "tied.onnx")
    shapes = [{"x": (b, s, 8), "z": (b, s, 8)} for b, s in ((3, 5), (4, 4), (7, 3))]
    text = check(model, tmp_path / "m.par", layout, shapes)
    assert "s74" not in text and "s5" not in text


def test_one_beside_n_is_refused_and_may_be_bound(tmp_path: Path) -> None:
    """onnxruntime would repeat it; here both are one symbol, unless --dim says that it is 1."""
    model = tied(tmp_path / "tied.onnx")
    sharder.shard(model, tmp_path / "m.par", options("data-parallel 2"))
    feeds = {"x": np.ones((4, 5, 8), np.float32), "z": np.ones((1, 5, 8), np.float32)}
    with (
        ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session,
        pytest.raises(InputError, match=r"'z' has 1 at dimension 0.*'x' has 4"),
    ):
        session.run(None, feeds)
    shapes = [{"x": (b, 5, 8), "z": (1, 5, 8)} for b in (2, 3, 4)]
    check(model, tmp_path / "n.par", "data-parallel 2", shapes, dims={"s74": 1})


def test_symbols_are_tied_by_hand(tmp_path: Path) -> None:
    model = save(
        tmp_path / "by_hand.onnx",
        """
        by_hand (float[b, past, 4] x, float[b, n, 4] z, float[b, total] m) => (float[p, q] y) {
            r = ReduceMax <axes = [1, 2], keepdims = 0> (x)
            s = ReduceMax <axes = [1, 2], keepdims = 0> (z)
            t = ReduceMax <axes = [1], keepdims = 0> (m)
            rs = Add (r, s)
            rst = Add (rs, t)
            axes = Constant <value_ints = [1]> ()
            column = Unsqueeze (rst, axes)
            y = Add (column, m)
        }
        """,
    )
    shapes = [{"x": (4, 5, 4), "z": (4, 3, 4), "m": (4, 8)}]
    dims = {"total": "past + n"}
    text = check(model, tmp_path / "m.par", "data-parallel 2", shapes, dims=dims)
    assert '"n + past"' in text
    bad = {"x": np.ones((4, 5, 4)), "z": np.ones((4, 3, 4)), "m": np.ones((4, 9))}
    with (
        ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session,
        pytest.raises(InputError, match=r"past|n \+"),
    ):
        session.run(None, {k: v.astype(np.float32) for k, v in bad.items()})


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ({"s74": "s2", "s2": "s74 + 1"}, "--dim s2=s74 [+] 1.*once"),
        ({"s74": "s74 + 1"}, "--dim s74=s74 [+] 1"),
        ({"s74": "batch"}, "no symbol batch; it has: s18, s2, s5, s74"),
        ({"s74": "s2 ** 2"}, "is not a size"),
        ({"other": "s2"}, "no such symbol"),
        ({"s74": 2**70}, "--dim s74=1180591620717411303424: give a size of at most"),
        ({"s74": 2.5}, "--dim s74=2.5: write a whole number"),
        ({"s74": "s2 +" * 1000}, "--dim s74=(s2 [+]){15}: this is not a size"),
    ],
)
def test_ties_that_cannot_be_are_named(dims: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = tied(tmp_path / "tied.onnx")
    with pytest.raises(StrategyError, match=says):
        sharder.shard(model, tmp_path / "m.par", options("data-parallel 2", dims=dims))


def test_a_dim_of_a_model_without_open_sizes(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
m (float[4,6] x) => (float[4,6] y) { y = Relu(x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "fixed.onnx")
    how = options("data-parallel 2", dims={"batch": 4})
    with pytest.raises(StrategyError, match=r"--dim batch: .*fixed\.onnx has no open sizes; leave"):
        sharder.shard(tmp_path / "fixed.onnx", tmp_path / "m.par", how)


def test_the_search_takes_no_split_without_a_formula(tmp_path: Path) -> None:
    """Over 4 ranks, the fastest strategy would cut an open width whose shards have none."""
    channels, rows = "Transpose <perm = [0, 3, 1, 2]>", "Transpose <perm = [0, 2, 3, 1]>"
    text = f"""<ir_version: 9, opset_import: ["" : 20]>
    m (float[b,3,h,v] x, float[16,3,4,4] w1, float[32,16,2,2] w2, float[32,1,7,7] w3,
      float[32] ws, float[32] wb, float[48,32,2,2] w4, float[48,1,7,7] w5, float[48,192] w6,
      float[192,48] w7, float[48,1,7,7] w8, float[48,192] w9, float[192,48] w10,
      float[48] wt, float[48] wc, float[64,48,2,2] w11) => (float[b,64,p,q] y) {{
      c1 = Conv <strides = [4, 4]> (x, w1)  c2 = Conv <strides = [2, 2]> (c1, w2)
      d1 = Conv <group = 32, pads = [3, 3, 3, 3]> (c2, w3)  r1 = {rows} (d1)
      n1 = LayerNormalization (r1, ws, wb)  t1 = {channels} (n1)
      s1 = {rows} (t1)  u1 = {channels} (s1)  c3 = Conv <strides = [2, 2]> (u1, w4)
      d2 = Conv <group = 48, pads = [3, 3, 3, 3]> (c3, w5)  r2 = {rows} (d2)
      m1 = MatMul (r2, w6)  m2 = MatMul (m1, w7)  t2 = {channels} (m2)
      d3 = Conv <group = 48, pads = [3, 3, 3, 3]> (t2, w8)  r3 = {rows} (d3)
      m3 = MatMul (r3, w9)  m4 = MatMul (m3, w10)  t3 = {channels} (m4)
      a = Add (t2, t3)  r4 = {rows} (a)  n2 = LayerNormalization (r4, wt, wc)
      t4 = {channels} (n2)  y = Conv <strides = [2, 2]> (t4, w11) }}"""
    path = write_text(text, tmp_path / "m.onnx")
    sizes = "b=1,h=224,v=224"
    onnxpar.shard(path, tmp_path / "m.par", devices=4, for_any_host=True, typical=sizes)
    whole = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    with ThreadSession(tmp_path / "m.par") as session:
        for size in ((1, 3, 32, 32), (2, 3, 65, 33), (1, 3, 224, 97)):
            x = np.random.default_rng(size).standard_normal(size, np.float32)
            (wanted,), (y,) = whole.run(None, {"x": x}), session.run(None, {"x": x})
            np.testing.assert_allclose(y, wanted, rtol=2e-4, atol=2e-4 * abs(wanted).max())


QUOTIENTS = {
    "itself": ("y = Div (n, n)", "needs 1 <= rows"),
    "a multiple": ("three = Mul (n, c) y = Div (three, n)", "needs 1 <= rows"),
    "another size": ("nm = Mul (n, m) y = Div (nm, n)", ""),
    "an integer": (
        "nm = Mul (n, m) q = Div (nm, n) i = Cast <to = 7> (q) y = Cast <to = 1> (i)",
        "needs 1 <= rows",
    ),
    "a difference": ("d = Sub (n, m) y = Div (d, d)", ""),
    "never 0": ("d = Add (n, c) y = Div (d, d)", ""),
}


@pytest.mark.parametrize("what", QUOTIENTS)
def test_a_size_of_0_divides_nothing(what: str, tmp_path: Path) -> None:
    """0 / 0 is not a number: such a run is refused by name, or gives what onnxruntime gives."""
    body, reason = QUOTIENTS[what]
    model = save(
        tmp_path / "ratio.onnx",
        f"""
        ratio (float[rows, columns] x) => (float[1] y) <float[1] c = {{3.0}}> {{
            r = Shape <start = 0, end = 1> (x)
            s = Shape <start = 1> (x)
            n = Cast <to = 1> (r)
            m = Cast <to = 1> (s)
            {body}
        }}
        """,
    )
    how: dict[str, Any] = {"strategy": {"tensors": {"x": ["tp", None]}}}
    sharder.shard(model, tmp_path / "m.par", options("tp=2", **how))
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for shape in [(0, 5), (4, 4), (3, 7)]:
            feeds = {"x": np.zeros(shape, np.float32)}
            wanted = run_unsplit(model, feeds)
            if reason and not shape[0]:
                with pytest.raises(InputError, match=reason):
                    session.run(None, feeds)
                sharder.shard(model, tmp_path / "at0.par", options("tp=2", dims={"rows": 0}, **how))
                with ThreadSession(tmp_path / "at0.par", timeout=TIMEOUT) as other:
                    np.testing.assert_array_equal(other.run(None, feeds), wanted)
            else:
                np.testing.assert_array_equal(session.run(None, feeds), wanted)
