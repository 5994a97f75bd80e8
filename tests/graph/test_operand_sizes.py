"""Open sizes that an op's operands share in their own way: at each size that the unsplit runtime
takes, ranks compute what it computes, or refuse the size by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from small_models import write_text

import onnxpar
from onnxpar.base.errors import InputError, StrategyError
from onnxpar.compiler.open_ports import open_ports
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.threads import ThreadSession

OF_ELEMENTS = """<ir_version: 8, opset_import: ["" : 18]>
m (float[3,N] data, int64[2,3] at, float[2,3] updates) => (float[3,N] y)
{{ y = {op} (data, at{more}) }}"""
WIDTHS = """<ir_version: 11, opset_import: ["" : 23]>
m (float[2,H,4,8] q, float[2,H,6,8] k, float[2,H,6,N] v, float[2,H,5,8] pk, float[2,H,5,N] pv)
=> (float[2,H,4,N] y, float[2,H,11,8] nk, float[2,H,11,N] nv)
{ y, nk, nv = Attention (q, k, v, , pk, pv) }"""
LOOP = """<ir_version: 8, opset_import: ["" : 17]>
m (float[N] x, int64 trips) => (float[] y, float[] z) <bool go = {1}> {
  y, z = Loop (trips, go, x)
    <body = b (int64 i, bool c, float[1] a) => (bool d, float[1] e, float[1] f)
    { d = Identity (c)  t = Cast <to = 1> (i)  e = Add (a, t)  f = Mul (e, e) }> }"""


def agrees(
    path: Path,
    split: dict[str, list[object]],
    feeds: list[dict[str, np.ndarray]],
    ranks: int = 3,
) -> int:
    """Runs each on the ranks; returns how many were refused by name, the others being right."""
    par, refused = path.with_suffix(".par"), 0
    onnxpar.shard(path, par, strategy={"mesh": {"x": ranks}, "tensors": split}, for_any_host=True)
    whole = ort.InferenceSession(str(path))
    with ThreadSession(par, timeout=60) as session:
        for feed in feeds:
            try:
                got = session.run(None, feed)
            except InputError as error:
                assert "N=" in str(error) or "but expects" in str(error), error
                refused += 1
                continue
            for own, wanted in zip(got, whole.run(None, feed), strict=True):
                np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-6)
    return refused


@pytest.mark.parametrize("op, more", [("ScatterElements", ", updates"), ("GatherElements", "")])
@pytest.mark.parametrize("split", [{"data": [None, "x"]}, {"at": [None, "x"]}, {"data": ["x", 1]}])
def test_indices_of_fewer_elements_than_the_tensor_has(
    op: str, more: str, split: dict[str, list[object]], tmp_path: Path
) -> None:
    text = OF_ELEMENTS.format(op=op, more=more)
    if op == "GatherElements":
        text = text.replace("(float[3,N] y)", "(float[2,3] y)")
    path = write_text(text, tmp_path / "m.onnx")
    random = np.random.default_rng(0)
    at = np.array([[1, 0, 2], [0, 2, 1]])
    feeds = [
        {"data": random.standard_normal((3, n), np.float32), "at": at}
        | {"updates": random.standard_normal((2, 3), np.float32)}
        for n in (3, 4, 5, 6, 11, 100)
    ]
    assert not agrees(path, split, feeds)


@pytest.mark.parametrize("split", [{"q": [1, "x", 1, 1]}, {"v": [1, 1, 1, "x"]}])
def test_values_and_their_cache_have_a_width_of_their_own(
    split: dict[str, list[object]], tmp_path: Path
) -> None:
    path, random = write_text(WIDTHS, tmp_path / "m.onnx"), np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    feeds = [
        {
            **{"q": drawn(2, h, 4, 8), "k": drawn(2, h, 6, 8), "v": drawn(2, h, 6, n)},
            **{"pk": drawn(2, h, 5, 8), "pv": drawn(2, h, 5, n)},
        }
        for h, n in ((3, 8), (3, 10), (1, 1), (2, 31), (7, 3), (4, 64))
    ]
    assert not agrees(path, split, feeds)


def test_a_scale_of_one_row_is_refused_by_name(tmp_path: Path) -> None:
    """It is repeated in the unsplit model, but a split for the other size would cut it."""
    path = write_text(
        """<ir_version: 8, opset_import: ["" : 17]>
        m (float[3,6] x, float[N,6] s, float[3,6] b) => (float[3,6] y)
        { y = LayerNormalization <axis = 0> (x, s, b) }""",
        tmp_path / "m.onnx",
    )
    random = np.random.default_rng(0)
    feed = {name: random.standard_normal((3, 6), np.float32) for name in "xsb"}
    assert agrees(path, {"x": [None, "x"]}, [feed, feed | {"s": feed["s"][:1]}]) == 1


@pytest.mark.parametrize("n", [1, 2, 5, 100])
def test_a_body_that_declares_another_size_than_it_gets(n: int, tmp_path: Path) -> None:
    """onnxruntime warns, and computes with what it gets."""
    path = write_text(LOOP, tmp_path / "m.onnx")
    feeds = [{"x": np.linspace(-1, 1, n, dtype=np.float32), "trips": np.array(4)}]
    assert not agrees(path, {"x": ["x"]}, feeds)


MASKS = {
    "Attention": (
        """<ir_version: 11, opset_import: ["" : 24]>
        m (float[2,3,4,8] q, float[2,3,6,8] k, float[2,3,6,8] v, float[SIZES] a) => (float[] y)
        { y = Attention (q, k, v, a) }""",
        {"q": (2, 3, 4, 8), "k": (2, 3, 6, 8), "v": (2, 3, 6, 8)},
    ),
    "MultiHeadAttention": (
        """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        m (float[2,4,24] q, float[2,6,24] k, float[2,6,24] v, float[SIZES] a) => (float[] y)
        { y = com.microsoft.MultiHeadAttention <num_heads = 3> (q, k, v, , , a) }""",
        {"q": (2, 4, 24), "k": (2, 6, 24), "v": (2, 6, 24)},
    ),
}


@pytest.mark.parametrize("split", ["q.0", "q.1", "q.2", "k.1", "k.2", "v.1", "a.1", "a.2", "a.3"])
@pytest.mark.parametrize(
    "sizes", ["N,3,4,6", "N,1,4,6", "2,N,4,6", "1,N,4,6", "2,3,N,6", "2,1,N,6"]
)
@pytest.mark.parametrize("op", MASKS)
def test_masks_repeat_over_batch_heads_and_queries(
    op: str, sizes: str, split: str, tmp_path: Path
) -> None:
    text, operands = MASKS[op]
    path = write_text(text.replace("SIZES", sizes), tmp_path / "m.onnx")
    random = np.random.default_rng(0)
    name, axis = split[0], int(split[2])
    cut: list[object] = [1] * len(operands.get(name, sizes.split(",")))
    cut[axis] = "x"
    full = (2, 3, 4)[sizes.split(",").index("N")]
    shapes = [tuple(n if s == "N" else int(s) for s in sizes.split(",")) for n in (1, full)]
    feeds = [
        {k: random.standard_normal(s, np.float32) for k, s in (*operands.items(), ("a", shape))}
        for shape in shapes
    ]
    try:
        refused = agrees(path, {name: cut}, feeds)
    except StrategyError as error:
        assert f"'{name}' dimension {axis}" in str(error), error
        return
    assert refused < len(feeds)


@pytest.mark.parametrize("split", [{"q": ["x", None, None]}, {"k": [None, "x", None]}])
def test_values_of_an_open_width_beside_each_other(
    split: dict[str, list[object]], tmp_path: Path
) -> None:
    """Of which ONNX infers that the result has no elements."""
    path = write_text(
        """<ir_version: 11, opset_import: ["" : 24]>
        m (float[3,4,32] q, float[3,N,8] k, float[3,N,W] v) => (float[3,4,Y] y)
        { y = Attention <q_num_heads = 4, kv_num_heads = 1> (q, k, v) }""",
        tmp_path / "m.onnx",
    )
    random = np.random.default_rng(0)
    feeds = [
        {
            **{"q": random.standard_normal((3, 4, 32), np.float32)},
            **{"k": random.standard_normal((3, n, 8), np.float32)},
            **{"v": random.standard_normal((3, n, w), np.float32)},
        }
        for n, w in ((6, 6), (1, 1), (3, 8), (100, 31))
        for _ in range(3)
    ]
    assert not agrees(path, split, feeds)


@pytest.mark.parametrize("split", ["x.1", "x.2", "x.3"])
@pytest.mark.parametrize("op", ["DepthToSpace", "SpaceToDepth"])
def test_blocks_of_an_open_dimension(op: str, split: str, tmp_path: Path) -> None:
    """Sizes of which nothing is left over, whatever the inference of shapes makes of others."""
    open_axis = "N,2,3" if op == "DepthToSpace" else "2,N,4"
    path = write_text(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        m (float[1,{open_axis}] x) => (float[] y) {{ y = {op} <blocksize = 2> (x) }}""",
        tmp_path / "m.onnx",
    )
    cut: list[object] = [1] * 4
    cut[int(split[2])] = "x"
    random, every = np.random.default_rng(0), (4, 8, 12, 80, 244)
    feeds = [
        {"x": random.standard_normal([1, *map(int, open_axis.replace("N", str(n)).split(","))])}
        for n in every
    ]
    assert not agrees(path, {"x": cut}, [{"x": f["x"].astype(np.float32)} for f in feeds])


@pytest.mark.parametrize("split", [{"k": [1, 1, "x", 1]}, {"q": [1, 1, "x", 1]}])
@pytest.mark.parametrize("sizes", ["K", "M"])
def test_keys_as_wide_as_queries_and_masks_as_long_as_keys(
    sizes: str, split: dict[str, list[object]], tmp_path: Path
) -> None:
    wide, long = ("N", "8") if sizes == "K" else ("8", "N")
    path = write_text(
        f"""<ir_version: 11, opset_import: ["" : 24]>
        m (float[2,3,4,8] q, float[2,3,8,{wide}] k, float[2,3,8,8] v, float[4,{long}] a)
        => (float[] y) {{ y = Attention (q, k, v, a) }}""",
        tmp_path / "m.onnx",
    )
    random = np.random.default_rng(0)
    shapes = {"q": (2, 3, 4, 8), "k": (2, 3, 8, 8), "v": (2, 3, 8, 8), "a": (4, 8)}
    feed = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    assert not agrees(path, split, [feed])
    short = feed | ({"k": feed["k"][..., :1]} if sizes == "K" else {"a": feed["a"][:, :5]})
    assert agrees(path, split, [feed, short]) == 1


def test_a_batch_of_as_many_texts_as_stored_lengths(tmp_path: Path) -> None:
    path = write_text(
        """<ir_version: 11, opset_import: ["" : 24]>
        m (float[N,3,4,8] q, float[N,3,8,8] k, float[N,3,8,8] v) => (float[] y)
        <int64[2] lengths = {6, 7}> { y = Attention (q, k, v, , , , lengths) }""",
        tmp_path / "m.onnx",
    )
    random = np.random.default_rng(0)
    feeds = [
        {
            name: random.standard_normal((n, 3, 4 if name == "q" else 8, 8), np.float32)
            for name in "qkv"
        }
        for n in (2, 1)
    ]
    assert agrees(path, {"q": [1, 1, "x", 1]}, feeds) == 1


@pytest.mark.parametrize("split", [{"sc": [1, "x"]}, {"x": ["x", 1]}, {"x": [1, "x"]}])
def test_as_many_iterations_as_an_operand_has_rows(
    split: dict[str, list[object]], tmp_path: Path
) -> None:
    """What the iterations make of a carried tensor changes no size of the operand."""
    path = write_text(
        """<ir_version: 8, opset_import: ["" : 17]>
        m (float[N,4] x) => (float[N,4] y, float[K,4] sc) {
          n = Shape <start = 0, end = 1> (x)  n0 = Squeeze (n)
          y, sc = Loop (n0, , x) <body = g (int64 i, bool c, float[N,4] s)
            => (bool c2, float[N,4] s2, float[4] o)
            { c2 = Identity (c)  o = Gather <axis = 0> (x, i)  s2 = Add (s, o) }> }""",
        tmp_path / "m.onnx",
    )
    random = np.random.default_rng(0)
    feeds = [{"x": random.standard_normal((n, 4), np.float32)} for n in (1, 3, 8, 31)]
    assert not agrees(path, split, feeds)


def test_a_size_that_no_input_has_is_refused(tmp_path: Path) -> None:
    """A run could not tell it."""
    made, ctx = sharder.plan(write_text(LOOP, tmp_path / "m.onnx"), Options(devices=2))
    made.inputs = [port for port in made.inputs if port.open is None]
    with pytest.raises(StrategyError, match="the size N is that of no input"):
        open_ports(made, ctx)


@pytest.mark.parametrize("split", ["x.0", "x.1", "x.2"])
@pytest.mark.parametrize("sizes", ["1,M,16", "N,M,16", "M,16"])
@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_what_is_skipped_may_be_the_same_for_the_batch(
    op: str, sizes: str, split: str, tmp_path: Path
) -> None:
    path = write_text(
        f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        m (float[N,M,16] x, float[{sizes}] s, float[16] g) => (float[N,M,16] y)
        {{ y = com.microsoft.{op} <epsilon = 0.001> (x, s, g) }}""",
        tmp_path / "m.onnx",
    )
    cut: list[object] = [1, 1, 1]
    cut[int(split[2])] = "x"
    random, feeds = np.random.default_rng(0), []
    for n, m in ((1, 1), (2, 1), (1, 5), (3, 3), (5, 20)):
        shape = [{"N": n, "M": m}.get(each) or int(each) for each in sizes.split(",")]
        drawn = {"x": (n, m, 16), "s": shape, "g": (16,)}
        feeds.append({k: random.standard_normal(s).astype(np.float32) for k, s in drawn.items()})
    assert not agrees(path, {"x": cut}, feeds)


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_writes_to_a_cache_of_fewer_rows_than_ranks(mode: str, tmp_path: Path) -> None:
    path = write_text(
        f"""<ir_version: 11, opset_import: ["" : 24]>
        m (float[1,2,M,4] c, float[1,2,N,4] u, int64[1] at) => (float[1,2,M,4] y)
        {{ y = TensorScatter <mode = "{mode}"> (c, u, at) }}""",
        tmp_path / "m.onnx",
    )
    random, feeds = np.random.default_rng(0), []
    for n, m in ((1, 1), (1, 2), (2, 2), (1, 3), (3, 5), (4, 7), (1, 64)):
        feed = {"c": random.standard_normal((1, 2, m, 4), np.float32)}
        feed["u"] = random.standard_normal((1, 2, n, 4), np.float32)
        feeds.append(feed | {"at": np.array([0 if mode == "linear" else m - 1])})
    assert not any(agrees(path, {"c": [1, 1, "x", 1]}, feeds, ranks) for ranks in (2, 3, 4))


@pytest.mark.parametrize("ranks_of_keys", ["y", "x"])
def test_attention_whose_queries_and_keys_are_split_over_different_axes(
    ranks_of_keys: str, tmp_path: Path
) -> None:
    """Of a size of 1, a rank has a stand-in for its queries and no keys."""
    text = """<ir_version: 11, opset_import: ["" : 24]>
    m (float[1,4,M,8] q, float[1,4,M,8] k, float[1,4,M,8] v) => (float[1,4,M,8] y)
    { y = Attention (q, k, v) }"""
    path, random = write_text(text, tmp_path / "m.onnx"), np.random.default_rng(4)
    par, tensors = tmp_path / "m.par", {"q": [None, None, "x", None]}
    tensors["k"] = [None, None, ranks_of_keys, None]
    onnxpar.shard(path, par, strategy={"mesh": {"x": 2, "y": 2}, "tensors": tensors})
    whole = ort.InferenceSession(str(path))
    with ThreadSession(par, timeout=60) as session:
        for size in (1, 2, 3, 5, 64):
            feed = {name: random.standard_normal((1, 4, size, 8), np.float32) for name in "qkv"}
            wanted = whole.run(None, feed)[0]
            np.testing.assert_allclose(session.run(None, feed)[0], wanted, rtol=1e-5, atol=1e-6)
