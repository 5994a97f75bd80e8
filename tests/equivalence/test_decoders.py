"""Folders of language models: caches in pages, and caches as the model has them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import options
from committed import MODELS
from decoders import Decoder, build
from onnx import GraphProto, NodeProto, helper, numpy_helper

import onnxpar
from onnxpar.graph.paged_attention import too_old
from onnxpar.planner import sharder

LLM = MODELS / "llm"
PAGED = sorted(p.name for p in LLM.iterdir() if not (p / "encoder_model.onnx").exists())
HOW: dict[str, dict[str, Any]] = {
    "2": {},
    "3": {"devices": 3},
    "4": {"devices": 4},
    "2 x 2": {"devices": None, "mesh": "dp=2,tp=2", "preset": "hybrid"},
    "searched": {"preset": None},
    "int8": {"kv_dtype": "int8"},
}
paged = pytest.mark.skipif(too_old() is not None, reason=str(too_old()))


def shard(name: str, folder: Path, **how: Any) -> Path:
    given = {"devices": 2, "preset": "tensor-parallel", "for_any_host": True, **how}
    onnxpar.shard(LLM / name, folder / "m.par", **given)
    return folder / "m.par"


@paged
@pytest.mark.matrix(6)
@pytest.mark.parametrize("how", HOW, ids=HOW)
@pytest.mark.parametrize("name", PAGED)
def test_caches_in_pages(name: str, how: str, tmp_path: Path) -> None:
    """The graph with pages is assumed to be the model's; ranks are proved against it."""
    par = shard(name, tmp_path, **HOW[how])
    result = onnxpar.verify(LLM / name, par)
    assert result.ok and sum(result.proved.values()) == result.nodes, result.text()
    ((file, reason),) = result.assumed.items()
    assert file == "rewritten.onnx" and "that both compute the same is not proved" in reason
    text = f"the ranks of {par} compute {par}/rewritten.onnx, made of {result.model}: logits"
    assert result.text().startswith(text)
    assert not onnxpar.verify(LLM / name, par, least="sampled").ok
    assert (par / "rewritten.onnx").stat().st_size < 1 << 17
    onnx.load(par / "rewritten.onnx")


@pytest.mark.matrix(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_encoder_decoders(name: str, ranks: int, tmp_path: Path) -> None:
    """Both folders are proved: against the branch, and the encoder with projections behind it."""
    par = shard(name, tmp_path, devices=ranks)
    result = onnxpar.verify(LLM / name, par)
    assert result.ok and sum(result.proved.values()) == result.nodes, result.text()
    assert [*result.assumed] == ["rewritten.onnx", "encoder/rewritten.onnx"]
    assert "past_key_values.0.encoder.key" in result.outputs
    if name == "bart":
        file = par / "encoder" / "rank_0001.onnx"
        change(file, without_sums)
        failures = onnxpar.verify(LLM / name, par).failures
        assert failures and all(failure.tensor not in ("", "logits") for failure in failures)


@paged
def test_pages_that_are_proved_before_they_are_named(tmp_path: Path) -> None:
    par = shard("phi3", tmp_path, verify=True)
    assert onnxpar.verify(LLM / "phi3", par).ok


@paged
def test_pages_of_another_model(tmp_path: Path) -> None:
    par = shard("gpt2_optimum", tmp_path)
    with pytest.raises(onnxpar.ModelError, match=r"n.onnx was not made from .*it reads a weigh"):
        onnxpar.verify(LLM / "phi3", par)
    graph = onnx.load(par / "rewritten.onnx")
    onnx.helper.set_model_props(graph, {"onnxpar.weights": '{"a": "../model.onnx"}'})
    onnx.save(graph, par / "rewritten.onnx")
    with pytest.raises(onnxpar.ModelError, match="names files of weights that are none"):
        onnxpar.verify(LLM / "gpt2_optimum", par)
    (par / "rewritten.onnx").unlink()
    with pytest.raises(onnxpar.OnnxparError, match="was not made from"):
        onnxpar.verify(LLM / "gpt2_optimum", par)


def change(file: Path, by: Callable[[GraphProto], None]) -> None:
    """Changes a rank's graph; its weights are then in the same file."""
    program = onnx.load(file)
    by(program.graph)
    onnx.save(program, file)


def attentions(main: GraphProto) -> list[NodeProto]:
    return [n for n in main.node if n.op_type == "PagedAttention"]


def other_caches(main: GraphProto) -> None:
    node = attentions(main)[0]
    node.input[3], node.input[4] = node.input[4], node.input[3]


def other_layer(main: GraphProto) -> None:
    first, second = attentions(main)[:2]
    first.input[3], second.input[3] = second.input[3], first.input[3]


def other_layers_everywhere(main: GraphProto) -> None:
    """Each layer reads and writes the caches of the other."""
    first, second = attentions(main)[:2]
    for field, places in (("input", (3, 4)), ("output", (1, 2))):
        for place in places:
            mine, theirs = getattr(first, field), getattr(second, field)
            mine[place], theirs[place] = theirs[place], mine[place]


def other_places(main: GraphProto) -> None:
    node = attentions(main)[0]
    node.input[6], node.input[7] = node.input[7], node.input[6]


def other_pages(main: GraphProto) -> None:
    """The table of pages counts from one."""
    one = numpy_helper.from_array(np.ones((), np.int64), "one")
    main.initializer.append(one)
    main.node.insert(0, helper.make_node("Add", ["block_table", "one"], ["pages_from_one"]))
    attentions(main)[0].input[5] = "pages_from_one"


def other_scale(main: GraphProto) -> None:
    (scale,) = (a for a in attentions(main)[-1].attribute if a.name == "scale")
    scale.f *= 2


def other_window(main: GraphProto) -> None:
    (window,) = (a for a in attentions(main)[0].attribute if a.name == "local_window_size")
    window.i = 3


def other_angles(main: GraphProto) -> None:
    node = attentions(main)[0]
    node.input[8], node.input[9] = node.input[9], node.input[8]


def angles_of_the_next_token(main: GraphProto) -> None:
    (table,) = (t for t in main.initializer if t.name == "cos_cache")
    table.CopyFrom(
        numpy_helper.from_array(np.roll(numpy_helper.to_array(table), -1, 0), table.name)
    )


def keys_of_another_head(main: GraphProto) -> None:
    """The heads of keys and values are exchanged in the weight that computes both."""
    (name,) = (n.input[1] for n in main.node if n.output[0] == attentions(main)[0].input[0])
    (weight,) = (t for t in main.initializer if t.name == name)
    value, width = numpy_helper.to_array(weight), numpy_helper.to_array(weight).shape[1] // 4
    queries, keys, values = value[:, : 2 * width], value[:, 2 * width : -width], value[:, -width:]
    swapped = np.concatenate([queries, values, keys], axis=1)
    weight.CopyFrom(numpy_helper.from_array(swapped, name))


def heads_in_another_order(main: GraphProto) -> None:
    """The rows of the weight behind an attention belong to other heads than its columns."""
    (weight,) = (
        t for t in main.initializer if t.name.endswith("layers.1.attn.o_proj.MatMul.weight")
    )
    value = numpy_helper.to_array(weight)
    rolled = np.roll(value, len(value) // 2, 0)
    weight.CopyFrom(numpy_helper.from_array(rolled, weight.name))


def without_sums(main: GraphProto) -> None:
    """An AllReduce hands on what it gets."""
    node = next(n for n in main.node if n.op_type == "AllReduce")
    for reader in main.node:
        reader.input[:] = [node.input[0] if n == node.output[0] else n for n in reader.input]


FAULTS = {
    "llama": (
        other_caches, other_layer, other_layers_everywhere, other_places, other_pages, other_scale,
        other_window, other_angles, angles_of_the_next_token, keys_of_another_head,
        heads_in_another_order, without_sums,
    ),
    "gpt2_optimum": (
        other_caches, other_layer, other_places, other_pages, other_scale, without_sums,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: shard(name, tmp_path_factory.mktemp(name)) for name in FAULTS}


@paged
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "all ranks"])
@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults]
)
def test_faults_of_pages(
    name: str, fault: Callable[[GraphProto], None], ranks: int, pages: dict[str, Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    par = Path(shutil.copytree(pages[name], tmp_path / "m.par"))
    for rank in range(ranks):
        change(par / f"rank_{rank:04d}.onnx", fault)
    assert not onnxpar.verify(LLM / name, par).ok


@paged
def test_caches_that_a_run_keeps_for_another_layer(pages: dict[str, Path], tmp_path: Path) -> None:
    """The graph is right, and plan.json says that the next run gets what another layer wrote."""
    par = Path(shutil.copytree(pages["llama"], tmp_path / "m.par"))
    plan = json.loads((par / "plan.json").read_text())
    first, second = (p for p in plan["states"] if p["input"].endswith("key"))
    first["output"], second["output"] = second["output"], first["output"]
    (par / "plan.json").write_text(json.dumps(plan))
    failures = onnxpar.verify(LLM / "llama", par).failures
    assert {failure.kind for failure in failures} == {"state"}


DECODERS = {
    "grouped": Decoder("GroupQueryAttention"),
    "grouped, a length for each text": Decoder(
        "GroupQueryAttention", options={"lengths": "vector"}
    ),
    "grouped, of fixed length": Decoder("GroupQueryAttention", length=48),
    "int4": Decoder("GroupQueryAttention", "int4", heads=6, shared=3),
    "ONNX": Decoder("Attention", options={"opset": 23}),
    "multi-head": Decoder("MultiHeadAttention"),
    "scattered": Decoder("plain", length=48, options={"spelling": "TensorScatter", "opset": 24}),
}


@pytest.mark.parametrize("name", DECODERS)
def test_caches_as_the_model_has_them(name: str, tmp_path: Path) -> None:
    """States of which ranks keep heads."""
    onnx.save(build(DECODERS[name]), tmp_path / "m.onnx")
    sharder.shard(tmp_path / "m.onnx", tmp_path / "m.par", options("tensor-parallel 2"))
    result = onnxpar.verify(tmp_path / "m.onnx", tmp_path / "m.par")
    assert result.ok, result.text()
