"""Models with open sizes run at several from one folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, check_outputs, options, run_unsplit
from committed import DYNAMIC, EVEN, MODELS, ODD, dims_of
from small_models import write_text

from onnxpar.base.errors import InputError, StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.layout.symbols import Polynomial
from onnxpar.load.load import load
from onnxpar.planner import sharder
from onnxpar.runtime.session.feeds import make_feeds
from onnxpar.runtime.session.threads import ThreadSession

LAYOUTS = ["2", "tensor-parallel 2", "tensor-parallel 3", "hybrid dp=2,tp=2"]
SIZES = (EVEN, ODD, {"batch": 3, "seq": 5, "target": 4, "past": 0})
EMPTY_BATCH = [name for name in DYNAMIC if "dynamo" in name and "unet" not in name]
"""The exports that onnxruntime runs on an empty batch."""
DECODE = "llama_decode.dynamo.dynamic.onnx"


def feeds_at(plan: Plan, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Random feeds of these sizes."""
    ports = plan.to_json()["inputs"]
    specs = [
        (p["name"], p["dtype"], [Polynomial.parse(str(s)).at(sizes) for s in p["shape"]])
        for p in ports
    ]
    feeds = make_feeds(specs, plan.ranges, seed)
    for name, bounds in plan.ranges.items():
        if bounds == (0, 2) and feeds[name].ndim:
            feeds[name][..., 0] = 1
    return feeds


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", DYNAMIC)
def test_one_folder_runs_at_all_sizes(model: str, layout: str, tmp_path: Path) -> None:
    par = tmp_path / "model.par"
    plan = sharder.shard(MODELS / model, par, options(layout))
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for sizes in SIZES:
            feeds = feeds_at(plan, dims_of(model, sizes))
            wanted = run_unsplit(MODELS / model, feeds)
            check_outputs(session.run(None, feeds), wanted, [p.name for p in plan.outputs])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["bert", "dlrm", "vit"])
def test_the_search_splits_only_what_a_run_can_tell(name: str, tmp_path: Path) -> None:
    """On ranks that talk at hardly any cost, everything is split that may be."""
    model = MODELS / f"{name}.dynamo.dynamic.onnx"
    host = {"name": "host", "latency": 1e-7, "bandwidth": 1e10}
    device = {"flops": 1e9, "memory_bandwidth": 1e9, "launch": 1e-8}
    cheap = Topology.of({"levels": [host], "device": device})
    how = replace(options("dp=2,tp=2"), topology=cheap)
    plan = sharder.shard(model, tmp_path / "m.par", how)
    assert plan.preset == "auto" and plan.collectives
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for sizes in (EVEN, ODD):
            feeds = feeds_at(plan, dims_of(model.name, sizes))
            wanted = run_unsplit(model, feeds)
            check_outputs(session.run(None, feeds), wanted, [p.name for p in plan.outputs])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["tensor-parallel 2", "tensor-parallel 3", "data-parallel 2"])
def test_llama_decodes_with_growing_caches_on_ranks(layout: str, tmp_path: Path) -> None:
    """32 greedy tokens: only token ids are fed, the caches stay where they are."""
    par = tmp_path / "model.par"
    plan = sharder.shard(MODELS / DECODE, par, options(layout))
    whole = ort.InferenceSession(str(MODELS / DECODE), providers=["CPUExecutionProvider"])
    names = [p.name for p in plan.outputs]
    first = feeds_at(plan, {"batch": 5, "past": 3})
    unsplit, split = dict(first), dict(first)
    pairs = dict(plan.states)
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for _ in range(32):
            wanted = dict(zip(names, whole.run(None, unsplit), strict=True))
            (logits,) = session.run(None, split, keep_states=True)
            check_outputs([logits], [wanted[names[0]]], names[:1])
            token = wanted[names[0]][:, -1:].argmax(-1)
            unsplit = {"input_ids": token} | {i: wanted[o] for i, o in pairs.items()}
            split = {"input_ids": token}
        for source, result in pairs.items():
            assert session.states.read(source).shape[2] == 3 + 32
            check_outputs([session.states.read(source)], [wanted[result]], [result])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["gpt2.legacy", "llama.dynamo", "falcon.legacy", "t5.dynamo"])
def test_a_sequence_is_split_at_any_remainder(name: str, ranks: int, tmp_path: Path) -> None:
    model = MODELS / f"{name}.dynamic.onnx"
    strategy = {"tensors": {"input_ids": [None, "tp"]}}
    plan = sharder.shard(model, tmp_path / "m.par", options(f"tp={ranks}", strategy=strategy))
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for length in (ranks, 7, 8, 9):
            sizes = {"batch": 2, "seq": length, "target": 5}
            feeds = feeds_at(plan, dims_of(model.name, sizes))
            wanted = run_unsplit(model, feeds)
            check_outputs(session.run(None, feeds), wanted, [p.name for p in plan.outputs])


@pytest.mark.slow
def test_plan_names_open_sizes(tmp_path: Path) -> None:
    plan = sharder.shard(MODELS / DECODE, tmp_path / "m.par", options("data-parallel 2"))
    ports = {p["name"]: p["shape"] for p in plan.to_json()["inputs"] + plan.to_json()["outputs"]}
    assert ports["past_key_0"] == ["batch", 4, "past", 6]
    assert ports["present_key_0"] == ["batch", 4, "past + 1", 6]


@pytest.mark.slow
def test_sizes_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    plan = sharder.shard(MODELS / DECODE, tmp_path / "m.par", options("data-parallel 2"))
    feeds = feeds_at(plan, {"batch": 4, "past": 3})
    feeds["past_key_1"] = feeds["past_key_1"][:, :, :2]
    with (
        ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session,
        pytest.raises(InputError, match="past_key_1"),
    ):
        session.run(None, feeds)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["hybrid dp=3,tp=2"])
@pytest.mark.parametrize("model", DYNAMIC)
def test_batches_below_the_number_of_ranks(model: str, layout: str, tmp_path: Path) -> None:
    """Ranks may hold nothing; where the unsplit model takes an empty batch, so do they."""
    plan = sharder.shard(MODELS / model, tmp_path / "m.par", options(layout))
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for batch, length in ((1, 5), (2, 1), (3, 4), (0, 5)):
            sizes = {"batch": batch, "seq": length, "target": 3, "past": length - 1}
            feeds = feeds_at(plan, dims_of(model, sizes))
            if batch == 0 and model not in EMPTY_BATCH:
                continue  # a Reshape of the unsplit model cannot tell its -1
            wanted = run_unsplit(MODELS / model, feeds)
            check_outputs(session.run(None, feeds), wanted, [p.name for p in plan.outputs])


@pytest.mark.slow
def test_a_cache_of_one_row_stays_on_four_ranks(tmp_path: Path) -> None:
    plan = sharder.shard(MODELS / DECODE, tmp_path / "m.par", options("data-parallel 4"))
    whole = ort.InferenceSession(str(MODELS / DECODE), providers=["CPUExecutionProvider"])
    names, pairs = [p.name for p in plan.outputs], dict(plan.states)
    first = feeds_at(plan, {"batch": 1, "past": 0})
    unsplit, split = dict(first), dict(first)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for _ in range(4):
            wanted = dict(zip(names, whole.run(None, unsplit), strict=True))
            check_outputs(session.run(None, split, keep_states=True), [wanted[names[0]]], names[:1])
            token = wanted[names[0]][:, -1:].argmax(-1)
            unsplit = {"input_ids": token} | {i: wanted[o] for i, o in pairs.items()}
            split = {"input_ids": token}
        for source, result in pairs.items():
            check_outputs([session.states.read(source)], [wanted[result]], [result])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt2.dynamo", "llama.dynamo", "t5.legacy"])
def test_a_sequence_shorter_than_its_ranks(name: str, tmp_path: Path) -> None:
    model = MODELS / f"{name}.dynamic.onnx"
    strategy = {"tensors": {"input_ids": [None, "tp"]}}
    plan = sharder.shard(model, tmp_path / "m.par", options("tp=4", strategy=strategy))
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for length in (1, 2, 3):
            feeds = feeds_at(plan, dims_of(model.name, {"batch": 2, "seq": length, "target": 3}))
            wanted = run_unsplit(model, feeds)
            check_outputs(session.run(None, feeds), wanted, [p.name for p in plan.outputs])


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_is_read_of_a_sequence_that_is_split(ranks: int, tmp_path: Path) -> None:
    """A row by its number, as a pooler reads the first, cuts the sequence into segments."""
    text = """
        <ir_version: 8, opset_import: ["" : 18]>
        pooled (float[batch, seq, 6] x) => (float[batch, 6] first, float[batch, seq, 6] y)
        <int64 zero = {0}>
        { h = Relu(x)  first = Gather<axis: int = 1>(h, zero)  e = Exp(h)  y = Neg(e) }"""
    model = tmp_path / "pooled.onnx"
    onnx.save(onnx.parser.parse_model(text), model)
    strategy = {"tensors": {"x": [None, "tp", None], "y": [None, None, None]}}
    plan = sharder.shard(model, tmp_path / "m.par", options(f"tp={ranks}", strategy=strategy))
    assert [c.kind for c in plan.collectives] == ["AllGather", "AllGather"]
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for length in (1, 2, 3, 5, 8, 9):
            feeds = feeds_at(plan, {"batch": 2, "seq": length})
            check_outputs(session.run(None, feeds), run_unsplit(model, feeds), ["first", "y"])


def test_parts_by_hand_need_a_size(tmp_path: Path) -> None:
    strategy = {"tensors": {"pixel_values": [{"dp": [3, 1]}, None, None, None]}}
    how = options("dp=2", strategy=strategy)
    with pytest.raises(StrategyError, match="--dim batch"):
        sharder.shard(MODELS / "resnet.dynamo.dynamic.onnx", tmp_path / "m.par", how)


def test_lengths_shorter_than_the_segments_of_what_is_whole(tmp_path: Path) -> None:
    """A decoder's mask compares each token with the one before it, which cuts the length in an
    element, a middle and an element; runs of one token have no such middle."""
    path = write_text(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[b,s,4] x) => (float[b,s,4] y, float[b,t,4] d)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] last = {-1}, int64[1] end = {9999}> {
          after = Slice(x, one, end, one)  before = Slice(x, zero, last, one)
          d = Sub(after, before)  y = Relu(x) }""",
        tmp_path / "m.onnx",
    )
    whole = ort.InferenceSession(path)
    sharder.shard(path, tmp_path / "m.par", options("data-parallel 2"))
    with ThreadSession(tmp_path / "m.par") as session:
        for batch, length in ((1, 1), (3, 1), (1, 2), (2, 3), (5, 7)):
            x = np.random.default_rng(length).standard_normal((batch, length, 4)).astype("f4")
            for got, wanted in zip(
                session.run(None, {"x": x}), whole.run(None, {"x": x}), strict=True
            ):
                np.testing.assert_array_equal(got, wanted)


def test_rows_of_a_table_as_long_as_two_open_sizes(tmp_path: Path) -> None:
    path = write_text(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[b,s] x, int64[k] i) => (float[k] y)
        <int64[1] flat = {-1}> { h = Relu(x)  t = Reshape(h, flat)  y = Gather(t, i) }""",
        tmp_path / "m.onnx",
    )
    whole = ort.InferenceSession(path)
    strategy = {"tensors": {"x": ["dp", None], "i": [None]}}
    plan = sharder.shard(path, tmp_path / "m.par", options("dp=3", strategy=strategy))
    assert [c.kind for c in plan.collectives] == ["AllReduce"]
    with ThreadSession(tmp_path / "m.par") as session:
        for batch, length in ((1, 1), (2, 5), (7, 3)):
            x = np.random.default_rng(length).standard_normal((batch, length)).astype("f4")
            feeds = {"x": x, "i": np.array([0, batch * length - 1, -1])}
            (got,) = session.run(None, feeds)
            np.testing.assert_array_equal(got, whole.run(None, feeds)[0])


def test_sizes_that_no_length_enlarges_do_not_enlarge_the_samples(tmp_path: Path) -> None:
    """Distances to the last position are negative at every length."""
    path = write_text(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[b,s] x) => (float[b,s] y)
        <int64 zero = {0}, int64 one = {1}> {
          n = Shape<start = 1>(x)  m = Neg(n)  low = Squeeze(m)
          distances = Range(low, zero, one)  d = Cast<to = 1>(distances)  y = Mul(x, d) }""",
        tmp_path / "m.onnx",
    )
    sizes = load(path).sizes
    assert sizes is not None and max(sizes.bindings[0].values()) < 100
    whole = ort.InferenceSession(path)
    sharder.shard(path, tmp_path / "m.par", options("dp=2,tp=2"))
    with ThreadSession(tmp_path / "m.par") as session:
        for shape in ((1, 1), (2, 5), (3, 3)):
            x = np.random.default_rng(1).standard_normal(shape).astype("f4")
            np.testing.assert_array_equal(
                session.run(None, {"x": x})[0], whole.run(None, {"x": x})[0]
            )
