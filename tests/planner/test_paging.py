"""Caches in pages: which decoders may have them, and what the rewrite makes of their inputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from committed import MODELS
from decoders import Decoder, build
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

import onnxpar
from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.cli.command_line import main
from onnxpar.graph.typical import sizes_text
from onnxpar.llm.generator import Generator
from onnxpar.load.page_caches import page_caches
from onnxpar.planner import context

LLAMA = MODELS / "llm" / "llama"
NORM = "/model/layers.2/final_norm_layernorm/output_0"
"""The tensor before the last product, (batch, length, 32)."""
Change = Callable[[GraphProto], None]


def decoder() -> onnx.ModelProto:
    return onnx.load(LLAMA / "model.onnx")


def written(change: Change, folder: Path) -> Path:
    """The changed decoder as a file."""
    model = decoder()
    change(model.graph)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def between(*nodes: NodeProto, **constants: np.ndarray) -> Change:
    """Puts nodes, which read `x` and make `y`, before the last product."""

    def change(graph: GraphProto) -> None:
        last = graph.node[-1]
        for node in nodes:
            node.input[:] = [NORM if name == "x" else name for name in node.input]
        last.input[0] = "y"
        graph.node.pop()
        graph.node.extend([*nodes, last])
        graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items())

    return change


MIXING = {
    "sum": between(helper.make_node("CumSum", ["x", "one"], ["y"]), one=np.array(1)),
    "mean": between(
        helper.make_node("ReduceMean", ["x", "axes"], ["m"]),
        helper.make_node("Sub", ["x", "m"], ["y"]),
        axes=np.array([1]),
    ),
    "softmax": between(helper.make_node("Softmax", ["x"], ["y"], axis=1)),
    "convolution": between(
        helper.make_node("Transpose", ["x"], ["a"], perm=[0, 2, 1]),
        helper.make_node("Conv", ["a", "w"], ["b"], group=32, pads=[2, 0]),
        helper.make_node("Transpose", ["b"], ["y"], perm=[0, 2, 1]),
        w=np.ones((32, 1, 3), "f4"),
    ),
    "neighbor": between(
        helper.make_node("Pad", ["x", "pads"], ["p"]),
        helper.make_node("Slice", ["p", "start", "end", "one"], ["y"]),
        pads=np.array([0, 1, 0, 0, 0, 0]),
        start=np.array([0]),
        end=np.array([-1]),
        one=np.array([1]),
    ),
    "reversed": between(
        helper.make_node("Slice", ["x", "start", "end", "one", "back"], ["y"]),
        start=np.array([-1]),
        end=np.array([np.iinfo("i8").min]),
        one=np.array([1]),
        back=np.array([-1]),
    ),
    "scores": between(
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "t"], ["s"]),
        helper.make_node("MatMul", ["s", "x"], ["y"]),
    ),
}
"""Changes after which a token's logits depend on its neighbors outside of attention."""
APART = {
    "pointwise": between(helper.make_node("Tanh", ["x"], ["y"])),
    "normalized": between(helper.make_node("Softmax", ["x"], ["y"], axis=-1)),
    "in-heads": between(
        helper.make_node("Reshape", ["x", "heads"], ["h"]),
        helper.make_node("Softmax", ["h"], ["n"]),
        helper.make_node("Reshape", ["n", "flat"], ["y"]),
        heads=np.array([0, -1, 8]),
        flat=np.array([0, -1, 32]),
    ),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", MIXING)
def test_decoders_that_mix_tokens_are_refused(name: str, tmp_path: Path) -> None:
    file = written(MIXING[name], tmp_path)
    with pytest.raises(ModelError, match=r"cannot be in pages, because .* may mix tokens"):
        onnxpar.plan(file, devices=2, page_size=16)
    assert onnxpar.plan(file, devices=2).inputs[1].name == "attention_mask"


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", APART)
def test_decoders_that_keep_tokens_apart_have_pages(name: str, tmp_path: Path) -> None:
    plan = onnxpar.plan(written(APART[name], tmp_path), devices=2, page_size=16)
    assert "block_table" in {port.name for port in plan.inputs}


def attribute(name: str, value: object) -> Change:
    """Sets an attribute of an attention."""

    def change(graph: GraphProto) -> None:
        node = next(n for n in graph.node if n.op_type == "GroupQueryAttention")
        node.attribute.append(helper.make_attribute(name, value))

    return change


def operand(index: int) -> Change:
    """Gives an attention one more operand."""

    def change(graph: GraphProto) -> None:
        node = next(n for n in graph.node if n.op_type == "GroupQueryAttention")
        node.input.extend([""] * (index + 1 - len(node.input)))
        node.input[index] = "cos_cache"

    return change


def more_output(graph: GraphProto) -> None:
    graph.output.append(helper.make_tensor_value_info(NORM, TensorProto.FLOAT, None))


def more_input(graph: GraphProto) -> None:
    info = helper.make_tensor_value_info("bias", TensorProto.FLOAT, [32])
    graph.input.append(info)
    between(helper.make_node("Add", ["x", "bias"], ["y"]))(graph)


def reads_mask(graph: GraphProto) -> None:
    between(
        helper.make_node("Cast", ["attention_mask"], ["m"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["m"], ["n"], keepdims=0),
        helper.make_node("Mul", ["x", "n"], ["y"]),
    )(graph)


def quantizes(graph: GraphProto) -> None:
    between(
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    )(graph)


@pytest.mark.parametrize(
    "change,reason",
    [
        (attribute("qk_output", 1), "qk_output=1"),
        (attribute("k_quant_type", "PER_TENSOR"), "k_quant_type"),
        (attribute("unheard_of", 1), "unheard_of=1"),
        (operand(10), "operand 10"),
        (operand(14), "operand 14"),
        (more_output, "one input of token ids and one output"),
        (more_input, "input 'bias' is neither token ids"),
        (reads_mask, "input 'attention_mask' is neither token ids"),
        (quantizes, "quantized by the range of all tokens .*DynamicQuantizeLinear"),
    ],
)
def test_what_pages_do_not_know_is_refused(change: Change, reason: str) -> None:
    model = decoder()
    change(model.graph)
    with pytest.raises(ModelError, match=f"cannot be in pages, because .*{reason}.*--page-size 0"):
        page_caches(model, 16)


def test_models_without_caches_that_are_known_are_refused(tmp_path: Path) -> None:
    decoder = Decoder("com.microsoft.Attention")
    onnx.save(build(decoder), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="it has no GroupQueryAttention"):
        onnxpar.plan(tmp_path / "model.onnx", devices=2, page_size=16)


@pytest.mark.slow
def test_folders_keep_their_caches_where_pages_cannot_be(tmp_path: Path) -> None:
    """By default; whether the attention is an unknown one, or tokens mix elsewhere."""
    shutil.copy(LLAMA / "tokenizer.json", tmp_path)

    def names(**options: int) -> set[str]:
        return {port.name for port in onnxpar.plan(tmp_path, devices=2, **options).inputs}

    onnx.save(build(Decoder("com.microsoft.Attention")), tmp_path / "model.onnx")
    assert "block_table" not in names()
    written(MIXING["mean"], tmp_path)
    assert "attention_mask" in names()
    with pytest.raises(ModelError, match="may mix tokens"):
        names(page_size=16)


@pytest.mark.slow
def test_folders_have_pages_by_default_and_files_do_not() -> None:
    def names(model: Path, **options: int) -> set[str]:
        return {port.name for port in onnxpar.plan(model, devices=2, **options).inputs}

    assert "block_table" in names(LLAMA)
    assert "block_table" in names(MODELS / "llm" / "gpt2_optimum")
    assert "block_table" not in names(LLAMA, page_size=0)
    assert "block_table" not in names(LLAMA / "model.onnx")
    assert "block_table" in names(LLAMA / "model.onnx", page_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("name,more", [("llama", {"kv_dtype": "int8"}), ("bart", {})])
def test_every_call_plans_the_same_model_of_a_folder(name: str, more: dict[str, str]) -> None:
    folder = MODELS / "llm" / name
    options: dict[str, Any] = {"devices": 2, "for_any_host": True, **more}
    plan = onnxpar.plan(folder, **options)
    rows = onnxpar.candidates(folder, **options).rows
    (searched,) = (row for row in rows if row.strategy == "auto")
    assert searched.memory["states_per_rank"] == plan.memory["states_per_rank"]
    assert searched.memory["weights_per_rank"] == plan.memory["weights_per_rank"]
    costs = onnxpar.node_costs(folder, "*", **options)
    assert plan.explained is not None and costs.sizes == sizes_text(plan.typical)
    assert {n.node for n in costs.nodes} <= {step.name for step in plan.explained.steps}


@pytest.mark.slow
@pytest.mark.parametrize("name,op", [("llama", "PagedAttention"), ("t5", "Softmax")])
def test_every_kind_of_plan_command_is_of_the_same_model(
    name: str, op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*how: str) -> Any:
        command = ["plan", str(MODELS / "llm" / name), "--devices", "2", "--for-any-host", "--json"]
        assert main([*command, *how]) == 0
        return json.loads(capsys.readouterr().out)

    memory = told()["memory"]
    assert told("--html", str(tmp_path / "plan.html"))["memory"] == memory
    rows = {row["strategy"]: row["memory"] for row in told("--candidates")["candidates"]}
    assert rows["auto"]["states_per_rank"] == memory["states_per_rank"]
    ops = {node["op"] for node in told("--costs", "*")["nodes"]}
    assert op in ops and not ops & {"GroupQueryAttention", "If"}


@pytest.mark.slow
def test_a_trace_is_compared_with_the_plan_of_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how: dict[str, Any] = {"devices": 2, "preset": "tensor-parallel", "for_any_host": True}
    onnxpar.shard(LLAMA, tmp_path / "m.par", **how)
    trace = tmp_path / "trace.json"
    with Generator(tmp_path / "m.par", timeout=30, profile=True) as generator:
        generator.generate("the", max_new_tokens=3)
        generator._session.end_profile(trace)
    assert "PagedAttention" in str(onnxpar.compare_trace(LLAMA, trace, **how))
    command = [
        "plan",
        str(LLAMA),
        "--preset",
        "tensor-parallel",
        "--devices",
        "2",
        "--for-any-host",
    ]
    assert main([*command, "--compare", str(trace)]) == 0
    assert "PagedAttention" in capsys.readouterr().out


@pytest.mark.slow
def test_every_call_refuses_pages_as_plan_does(tmp_path: Path) -> None:
    """Or keeps the caches as they are, where nothing asks for pages."""
    how: dict[str, Any] = {"devices": 2, "for_any_host": True}
    for call in (onnxpar.plan, onnxpar.candidates, partial(onnxpar.node_costs, node="*")):
        with pytest.raises(StrategyError, match="--kv-dtype int8: only caches in pages"):
            call(LLAMA, page_size=0, kv_dtype="int8", **how)
    shutil.copy(LLAMA / "tokenizer.json", tmp_path)
    written(MIXING["mean"], tmp_path)
    assert onnxpar.candidates(tmp_path, **how).winner.memory["states_per_rank"] < 100_000
    assert onnxpar.node_costs(tmp_path, "*GroupQueryAttention*", **how).nodes
    with pytest.raises(ModelError, match="may mix tokens"):
        onnxpar.candidates(tmp_path, page_size=16, **how)


def test_page_sizes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="--page-size -1"):
        onnxpar.plan(LLAMA, devices=2, page_size=-1)
    with pytest.raises(StrategyError, match="annotate works with the inputs of the model"):
        onnxpar.annotate(LLAMA, tmp_path / "a.onnx", devices=2, page_size=4)
    with pytest.raises(StrategyError, match="check works with the inputs of the model"):
        onnxpar.check(LLAMA, devices=2, page_size=4)


def test_logits_are_computed_for_picked_tokens_alone() -> None:
    model = decoder()
    pairs = page_caches(model, 16)
    assert len(pairs) == 4
    (pick,) = (
        n for n in model.graph.node if n.op_type == "Gather" and n.input[1] == "picked_tokens"
    )
    (product,) = (n for n in model.graph.node if "logits" in n.output)
    assert pick.input[0] == NORM and product.input[0] == pick.output[0]
    assert {i.name for i in model.graph.input} - {past for past, _ in pairs} == {
        "input_ids",
        "block_table",
        "token_rows",
        "token_positions",
        "temperatures",
        "asked_tokens",
        "picked_tokens",
    }


LAST = {
    "gather": between(
        helper.make_node("Gather", ["x", "last"], ["y"], axis=1), last=np.array([-1])
    ),
    "gather-and-unsqueeze": between(
        helper.make_node("Gather", ["x", "last"], ["g"], axis=1),
        helper.make_node("Unsqueeze", ["g", "axes"], ["y"]),
        last=np.array(-1),
        axes=np.array([1]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAST)
def test_logits_of_the_last_token_alone_are_picked_too(name: str, tmp_path: Path) -> None:
    """As the builder's option prune_lm_head makes them."""
    for file in LLAMA.iterdir():
        shutil.copy(file, tmp_path)
    written(LAST[name], tmp_path)
    onnxpar.shard(tmp_path, tmp_path / "m.par", devices=2)
    prompt, tokens = next(iter(json.loads((LLAMA / "expected.json").read_bytes()).items()))
    with Generator(tmp_path / "m.par", timeout=30) as generator:
        assert generator.model.page_size == 16
        assert generator.generate(prompt, max_new_tokens=20)[0].tokens == tokens[:20]


@pytest.mark.slow
def test_pages_count_once_in_memory() -> None:
    def memory(pages: int) -> tuple[int, int]:
        sizes = {"new_tokens": 8, "texts": 8, "pages_of_text": 32, "pages": pages, "picks": 8}
        plan = onnxpar.plan(LLAMA, devices=2, preset="tensor-parallel", typical=sizes)
        return plan.memory["states_per_rank"], plan.memory["activations_per_rank"]

    few, many = memory(100), memory(1000)
    assert few[0] == 100 * 4096 and many[0] == 1000 * 4096
    assert few[1] == many[1]


@pytest.mark.slow
def test_the_search_counts_pages_once_too() -> None:
    """They are written where they are."""
    plan = onnxpar.plan(LLAMA, devices=2, memory_limit="5MB")
    assert 4e6 < sum(plan.memory.values()) <= 5e6


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "limit,how,remedy",
    [
        ("3MB", {"devices": 2}, "give --devices 4, the fewest"),
        ("200kB", {"devices": 2}, "up to 32 ranks were tried and do not suffice"),
        ("3MB", {"mesh": "tp=2"}, "a mesh of more ranks"),
        ("3MB", {"devices": 2, "preset": "tensor-parallel"}, "let --search auto choose"),
    ],
)
def test_a_limit_that_pages_exceed_names_the_number_of_pages(
    limit: str, how: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(StrategyError, match=f"{remedy}.*--typical pages=N.*--kv-memory") as caught:
        onnxpar.plan(LLAMA, memory_limit=limit, **how)
    assert "4.1943 MB of it for states" in str(caught.value)
    made = onnxpar.plan(LLAMA, devices=2, memory_limit="3MB", typical="pages=64")
    assert sum(made.memory.values()) <= 3e6


@pytest.mark.slow
def test_a_table_of_tokens_is_split_where_a_step_takes_little_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level = {"name": "host", "size": 2, "latency": 1e-6, "bandwidth": 1e8}
    host = {"device": {"flops": 1e7, "memory_bandwidth": 1e7}, "levels": [level]}
    found = onnxpar.plan(LLAMA, devices=2, topology=host)
    monkeypatch.setattr(context, "HOLDING", 0.0)
    others = onnxpar.plan(LLAMA, devices=2, topology=host)
    table = 320 * 32 * 4
    assert found.memory["weights_per_rank"] <= others.memory["weights_per_rank"] - table // 2
    seconds = [plan.predicted.compute + plan.predicted.communication for plan in (found, others)]
    assert seconds[0] <= 1.05 * seconds[1]
