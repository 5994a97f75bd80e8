"""PagedAttention, against onnxruntime's GroupQueryAttention on each text alone; and its parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxpar.graph.paged_attention import COMPUTE, PAGED_ATTENTION, PAGED_ATTENTION_PART, too_old
from onnxpar.runtime.ranks.library import library_path

pytestmark = pytest.mark.skipif(too_old() is not None, reason=str(too_old()))
ROWS, PAGE = 64, 4
"""Positions of the caches of cosines and sines, and of a page."""


@dataclass(frozen=True)
class Case:
    """An attention, as attributes and sizes."""

    heads: int = 4
    shared: int = 2
    width: int = 16
    packed: bool = False
    turned: int = 16
    interleaved: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    window: int = -1
    smooth: int = 0
    sink: bool = False
    dtype: str = "float32"
    kv: str = ""

    @property
    def attributes(self) -> dict[str, float | int]:
        """Attributes of both ops."""
        return {
            "num_heads": self.heads,
            "kv_num_heads": self.shared,
            "scale": self.scale,
            "softcap": self.softcap,
            "local_window_size": self.window,
            "rotary_interleaved": self.interleaved,
            "smooth_softmax": self.smooth,
        }

    @property
    def cache(self) -> str:
        """The type of caches."""
        return self.kv or self.dtype

    @property
    def type(self) -> int:
        """The type of elements."""
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)))


CASES = {
    "grouped": Case(),
    "one-head": Case(heads=1, shared=1),
    "all-share-one": Case(heads=6, shared=1),
    "each-has-its-own": Case(shared=4),
    "packed": Case(packed=True),
    "no-rotation": Case(turned=0),
    "part-rotated": Case(turned=16, width=32),
    "interleaved": Case(interleaved=1),
    "scaled": Case(scale=0.3),
    "far-apart": Case(scale=20.0),  # powers that are less than the least float32
    "softcap": Case(softcap=2.5),
    "window": Case(window=5),
    "window-of-one": Case(window=1),
    "smooth": Case(smooth=1),
    "sink": Case(sink=True),
    "wide": Case(width=80, turned=80, heads=5, shared=5),
    "float16": Case(dtype="float16"),
    "float16-caches": Case(kv="float16"),
    "float32-caches-of-float16": Case(dtype="float16", kv="float32"),
    "int8-caches": Case(kv="int8"),
    "int8-caches-of-float16": Case(dtype="float16", kv="int8", packed=True),
    "int8-caches-without-rotation": Case(kv="int8", turned=0, width=24),
    "all": Case(packed=True, softcap=3.0, window=7, scale=0.2, sink=True, width=32),
}
KERNEL_ERROR = (
    ort.capi.onnxruntime_pybind11_state.RuntimeException,
    ort.capi.onnxruntime_pybind11_state.Fail,
)
LENGTHS = (1, 3, 21, 40)
"""Tokens of each text."""


def arrays(case: Case, length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Queries, keys and values of a text, (length, heads times width)."""
    own, other = case.heads * case.width, case.shared * case.width
    sizes = {"query": own, "key": other, "value": other}
    found = {n: rng.standard_normal((length, s)).astype(case.dtype) for n, s in sizes.items()}
    if case.packed:
        return {"query": np.concatenate(list(found.values()), axis=1)}
    return found


def tables(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Cosines, sines and sinks, as far as there are any."""
    angles = rng.uniform(0, 6, (ROWS, case.turned // 2))
    found = {"cos": np.cos(angles), "sin": np.sin(angles)} if case.turned else {}
    if case.sink:
        found["sink"] = rng.standard_normal(case.heads)
    return {name: array.astype(case.dtype) for name, array in found.items()}


def session(
    case: Case,
    op: str,
    domain: str,
    names: list[str],
    integers: dict[str, int],
    scale_bytes: int | None = None,
    page_size: int = PAGE,
) -> ort.InferenceSession:
    """A model of one node; `integers` are types of inputs that are not of the case's type."""
    ranks = {"query": 3, "keys": 4, "values": 4}
    ports = [
        helper.make_tensor_value_info(
            n, integers.get(n, case.type), [None] * ranks[n] if n in ranks else None
        )
        for n in names
        if n
    ]
    results = ["y", "new_keys", "new_values"]
    attributes = dict(case.attributes)
    types = dict.fromkeys(results, case.type)
    if domain != COMPUTE:
        attributes["do_rotary"] = int(case.turned > 0)
    else:
        scale = 4 * (case.cache == "int8") if scale_bytes is None else scale_bytes
        attributes["scale_bytes"] = scale
        cache = int(helper.np_dtype_to_tensor_dtype(np.dtype(case.cache)))
        types |= dict.fromkeys(results[1:], cache)
    if op == PAGED_ATTENTION_PART:
        results.append("log_sum")
        attributes["page_size"] = page_size
        types |= dict.fromkeys(("y", "log_sum"), TensorProto.FLOAT)
    node = helper.make_node(op, names, results, domain=domain, **attributes)
    outputs = [helper.make_tensor_value_info(n, types[n], None) for n in results]
    graph = helper.make_graph([node], "one", ports, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def alone(case: Case, text: dict[str, np.ndarray], stored: dict[str, np.ndarray]) -> np.ndarray:
    """The result of a text in one run of GroupQueryAttention, (length, heads times width)."""
    names = ["query", "key" if not case.packed else "", "value" if not case.packed else ""]
    names += ["past_keys", "past_values", "lengths", "total"]
    names += ["cos", "sin"] if case.turned else ["", ""]
    names += ["", "", "sink"] if case.sink else []
    types = {"lengths": TensorProto.INT32, "total": TensorProto.INT32}
    found = session(case, "GroupQueryAttention", "com.microsoft", names, types)
    length = len(text["query"])
    empty = np.zeros((1, case.shared, 0, case.width), case.dtype)
    feeds = {name: array[None] for name, array in text.items()} | stored
    feeds |= {"past_keys": empty, "past_values": empty}
    feeds |= {"lengths": np.array([length - 1], "i4"), "total": np.array([length], "i4")}
    return np.asarray(found.run(["y"], feeds)[0][0])


class Paged:
    """Texts whose keys and values are in pages, in any order; or the positions `held` of each
    page."""

    def __init__(
        self, case: Case, count: int, rng: np.random.Generator, held: list[int] | None = None
    ) -> None:
        names = ["query", "key" if not case.packed else "", "value" if not case.packed else ""]
        names += ["keys", "values", "table", "rows", "positions"]
        names += ["cos", "sin"] if case.turned else ["", ""]
        names += ["sink"] if case.sink else []
        self.held = {} if held is None else {"held": np.array(held, np.int64)}
        if held is not None:
            names += [*[""] * (11 - len(names)), "held"]
        types = dict.fromkeys(("table", "rows", "positions", *self.held), TensorProto.INT64)
        cache = int(helper.np_dtype_to_tensor_dtype(np.dtype(case.cache)))
        types |= dict.fromkeys(("keys", "values"), cache)
        op = PAGED_ATTENTION if held is None else PAGED_ATTENTION_PART
        self.session = session(case, op, COMPUTE, names, types)
        pages = ROWS // PAGE
        self.table = rng.permutation(count * pages).reshape(count, pages)
        row = case.width + 4 * (case.cache == "int8")
        shape = (count * pages, case.shared, PAGE if held is None else len(held), row)
        unwritten = -1 if case.cache == "int8" else np.nan  # as scales, too, -1 is no number
        self.keys, self.values = (np.full(shape, unwritten, case.cache) for _ in range(2))

    def run(
        self, tokens: dict[str, np.ndarray], rows: list[int], positions: list[int], **stored: object
    ) -> np.ndarray:
        """Appends tokens to texts; returns their results, for parts with their log-sums."""
        feeds = {name: array[None] for name, array in tokens.items()} | stored
        feeds |= {"keys": self.keys, "values": self.values, "table": self.table}
        feeds |= {"rows": np.array(rows), "positions": np.array(positions)} | self.held
        y, self.keys, self.values, *sums = self.session.run(None, feeds)
        return np.concatenate([y[0], *(s[0] for s in sums)], axis=1)


@pytest.mark.matrix
@pytest.mark.parametrize("together", [1, 7, 100])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_each_text_alone(case: Case, together: int) -> None:
    """Tokens of all texts come in turns, up to `together` of a text at a time."""
    rng = np.random.default_rng(len(str(case)))
    texts, stored = [arrays(case, n, rng) for n in LENGTHS], tables(case, rng)
    paged, done = Paged(case, len(texts), rng), [0] * len(texts)
    results: list[list[np.ndarray]] = [[] for _ in texts]
    while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
        rows, positions, parts = [], [], []
        for row in rng.permutation(len(texts)):
            new = range(done[row], min(done[row] + together, LENGTHS[row]))
            rows += [int(row)] * len(new)
            positions += new
            parts.append({n: a[new.start : new.stop] for n, a in texts[row].items()})
            done[row] = new.stop
        tokens = {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}
        y = paged.run(tokens, rows, positions, **stored)
        for row in range(len(texts)):
            results[row].append(y[np.array(rows) == row])
    tolerance = 2e-3 if "float16" in (case.dtype, case.cache) else 2e-6
    tolerance *= max(1, case.scale)  # as the roundings of scores
    tolerance = 4e-2 if case.cache == "int8" else tolerance
    for text, parts_of in zip(texts, results, strict=True):
        expected = alone(case, text, stored)
        np.testing.assert_allclose(
            np.concatenate(parts_of).astype("f4"), expected.astype("f4"), tolerance, tolerance
        )


@pytest.mark.matrix
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[1, 3], [0, 2]], [[], [3], [0, 1, 2]]])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_together_are_the_whole(case: Case, parts: list[list[int]]) -> None:
    rng = np.random.default_rng(len(str(case)))
    text, stored = arrays(case, 21, rng), tables(case, rng)
    pieces = [{n: a[at] for n, a in text.items()} for at in (slice(20), slice(20, 21))]
    whole, ranks = Paged(case, 1, rng), [Paged(case, 1, rng, held) for held in parts]
    for positions, piece in zip(([*range(20)], [20]), pieces, strict=True):
        at = [0] * len(positions), positions
        expected = whole.run(piece, *at, **stored)
        each = np.array([rank.run(piece, *at, **stored) for rank in ranks])
        sums = each[..., None, -case.heads :].swapaxes(-1, -2)  # rank, token, head, 1
        means = each[..., : -case.heads].reshape(*sums.shape[:3], case.width)
        weights = np.exp(sums - sums.max(0))
        found = (means * weights).sum(0) / weights.sum(0)
        tolerance = 1e-3 if case.dtype == "float16" else 2e-6 * max(1, case.scale)
        found = found.reshape(expected.shape)
        np.testing.assert_allclose(found, expected.astype("f4"), tolerance, tolerance)


def test_parts_that_do_not_fit_are_refused() -> None:
    case, rng = Case(turned=0), np.random.default_rng(3)
    text = arrays(case, 1, rng)
    for held in ([2, 1], [1, 1], [3, 4], [-1]):
        with pytest.raises(
            KERNEL_ERROR, match=r"held has .* it must ascend and be less than page_size=4"
        ):
            Paged(case, 1, rng, held).run(text, [0], [0])
    part = Paged(case, 1, rng, [0, 1])
    part.held = {"held": np.arange(3)}
    with pytest.raises(KERNEL_ERROR, match="held has shape"):
        part.run(text, [0], [0])
    names = [
        "query",
        "key",
        "value",
        "keys",
        "values",
        "table",
        "rows",
        "positions",
        "",
        "",
        "",
        "held",
    ]
    types = dict.fromkeys(("table", "rows", "positions", "held"), TensorProto.INT64)
    with pytest.raises(KERNEL_ERROR, match="page_size=0 is not positive"):
        session(case, PAGED_ATTENTION_PART, COMPUTE, names, types, page_size=0)


def test_bits_do_not_depend_on_company() -> None:
    """A token's result is the same alone, in chunks and beside other texts."""
    case, rng = Case(heads=8, window=30), np.random.default_rng(1)
    text, stored = arrays(case, 60, rng), tables(case, rng)
    other = arrays(case, 60, rng)
    found = []
    for sizes in ([60], [1] * 60, [7, 20, 33]):
        paged, parts, at = Paged(case, 2, rng), [], 0
        for size in sizes:
            both = {
                n: np.concatenate([other[n][at : at + size], a[at : at + size]])
                for n, a in text.items()
            }
            at_each = [*range(at, at + size)]
            y = paged.run(both, [0] * size + [1] * size, at_each * 2, **stored)
            parts.append(y[size:])
            at += size
        found.append(np.concatenate(parts))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_rows_of_int8_have_a_scale() -> None:
    case, rng = Case(turned=0, kv="int8"), np.random.default_rng(4)
    paged, text = Paged(case, 1, rng), arrays(case, 3, rng)
    text["value"][1] = 0
    text["value"][2, 3] = np.inf
    paged.run(text, [0] * 3, [0, 1, 2])
    written = paged.values[paged.table[0, 0]].transpose(1, 0, 2)  # position, head, row
    scales = np.ascontiguousarray(written[..., 16:]).view("f4")
    expected = text["value"].reshape(PAGE - 1, 2, 16)
    np.testing.assert_allclose(scales[0, :, 0], np.abs(expected[0]).max(-1) / 127, rtol=1e-6)
    found = written[0, :, :16] * scales[0]
    assert np.abs(found - expected[0]).max() <= scales[0].max() / 2 * 1.001
    assert not written[1].any() and np.isnan(scales[2, 0, 0]) and np.isfinite(scales[2, 1, 0])


def test_caches_are_written_in_place() -> None:
    case, rng = Case(), np.random.default_rng(2)
    paged, stored = Paged(case, 1, rng), tables(case, rng)
    paged.keys[:] = paged.values[:] = 0
    binding = paged.session.io_binding()
    feeds = {n: a[None] for n, a in arrays(case, 5, rng).items()} | stored
    feeds |= {"table": paged.table, "rows": np.zeros(5, "i8"), "positions": np.arange(5)}
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    values = {
        n: ort.OrtValue.ortvalue_from_numpy(a)
        for n, a in (("keys", paged.keys), ("values", paged.values))
    }
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(f"new_{name}", value)
    binding.bind_output("y")
    paged.session.run_with_iobinding(binding)
    y = paged.session.run(None, feeds | {"keys": paged.keys, "values": paged.values})
    for name, expected in zip(("keys", "values"), y[1:], strict=True):
        np.testing.assert_array_equal(values[name].numpy(), expected)
        assert np.count_nonzero(expected.any(axis=(1, 3))) == 5


def test_what_does_not_fit_is_refused() -> None:
    case, rng = Case(), np.random.default_rng(3)
    stored, text = tables(case, rng), arrays(case, 1, rng)
    paged = Paged(case, 2, rng)
    for rows, positions in (([2], [0]), ([-1], [0]), ([0], [ROWS]), ([0], [-1])):
        with pytest.raises(KERNEL_ERROR, match=r"block_table has 2 rows and room for 64"):
            paged.run(text, rows, positions, **stored)
    paged.table = np.full((1, 2), 99)
    with pytest.raises(KERNEL_ERROR, match=r"names page 99, but the caches have 32"):
        paged.run(text, [0], [0], **stored)
    with pytest.raises(KERNEL_ERROR, match=r"caches are int8, but scale_bytes is 0"):
        mixed = Paged(case, 1, rng)
        mixed.keys, mixed.values = (np.zeros((16, 2, PAGE, 16), "i1") for _ in range(2))
        mixed.session = session(
            Case(kv="int8"),
            PAGED_ATTENTION,
            COMPUTE,
            ["query", "key", "value", "keys", "values", "table", "rows", "positions"],
            {"keys": TensorProto.INT8, "values": TensorProto.INT8}
            | dict.fromkeys(("table", "rows", "positions"), TensorProto.INT64),
            scale_bytes=0,
        )
        mixed.run(text, [0], [0])
    short = {name: array[:2] for name, array in stored.items()}
    paged.table = np.arange(2)[None]
    with pytest.raises(KERNEL_ERROR, match=r"position 2 is outside of cos_cache"):
        paged.run(text, [0], [2], **short)
    with pytest.raises(KERNEL_ERROR, match=r"key has shape"):
        paged.run(text | {"key": text["value"][:, :5]}, [0], [0], **stored)


def test_schema_infers_shapes() -> None:
    case = Case(packed=True)
    names = ["query", "", "", "keys", "values", "table", "rows", "positions"]
    node = helper.make_node(
        PAGED_ATTENTION, names, ["y", "k", "v"], domain=COMPUTE, **case.attributes
    )
    shapes = {"query": [1, "t", 8 * 16], "keys": ["p", 2, PAGE, 16], "values": ["p", 2, PAGE, 16]}
    ports = [helper.make_tensor_value_info(n, case.type, s) for n, s in shapes.items()]
    ports += [helper.make_tensor_value_info("table", TensorProto.INT64, ["r", "m"])]
    ports += [helper.make_tensor_value_info(n, TensorProto.INT64, ["t"]) for n in names[-2:]]
    outputs = [helper.make_empty_tensor_value_info(n) for n in ("y", "k", "v")]
    model = helper.make_model(
        helper.make_graph([node], "one", ports, outputs),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(COMPUTE, 1)],
    )
    found = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    dims = {
        o.name: [d.dim_value or d.dim_param for d in o.type.tensor_type.shape.dim]
        for o in found.graph.output
    }
    assert dims == {"y": [1, "t", 64], "k": ["p", 2, PAGE, 16], "v": ["p", 2, PAGE, 16]}
