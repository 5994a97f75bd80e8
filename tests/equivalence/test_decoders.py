"""Folders of language models: caches in pages, and caches as the model has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from agreement import options
from committed import MODELS
from decoders import Decoder, build
from onnx import GraphProto

import onnxpar
from onnxpar.graph.paged_attention import too_old
from onnxpar.planner import sharder

LLM = MODELS / "llm"
paged = pytest.mark.skipif(too_old() is not None, reason=str(too_old()))


def shard(name: str, folder: Path, **how: Any) -> Path:
    given = {"devices": 2, "preset": "tensor-parallel", "for_any_host": True, **how}
    onnxpar.shard(LLM / name, folder / "m.par", **given)
    return folder / "m.par"


@paged
@pytest.mark.parametrize("how", [{}, {"kv_dtype": "int8"}], ids=["", "int8"])
@pytest.mark.parametrize("name", ["gpt2_optimum", "phi3", "gpt_oss"])
def test_caches_in_pages(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    """The graph with pages is assumed to be the model's; ranks are proved against it."""
    par = shard(name, tmp_path, **how)
    result = onnxpar.verify(LLM / name, par)
    assert result.ok, result.text()
    ((file, reason),) = result.assumed.items()
    assert file == str(par / "paged.onnx") and "the loader made it from" in reason
    assert f"assumed: {par}/paged.onnx" in result.text()
    assert not onnxpar.verify(LLM / name, par, least="sampled").ok
    assert (par / "paged.onnx").stat().st_size < 1 << 17
    onnx.load(par / "paged.onnx")


@paged
def test_pages_of_another_model(tmp_path: Path) -> None:
    par = shard("gpt2_optimum", tmp_path)
    with pytest.raises(
        onnxpar.ModelError, match=r"paged.onnx was not made from .*it reads a weigh"
    ):
        onnxpar.verify(LLM / "phi3", par)
    (par / "paged.onnx").unlink()
    with pytest.raises(onnxpar.OnnxparError, match="was not made from"):
        onnxpar.verify(LLM / "gpt2_optimum", par)


def attentions(main: GraphProto) -> list[onnx.NodeProto]:
    return [n for n in main.node if n.op_type == "PagedAttention"]


def other_caches(main: GraphProto) -> None:
    node = attentions(main)[0]
    node.input[3], node.input[4] = node.input[4], node.input[3]


def other_layer(main: GraphProto) -> None:
    first, second = attentions(main)[:2]
    first.input[3], second.input[3] = second.input[3], first.input[3]


def other_places(main: GraphProto) -> None:
    node = attentions(main)[0]
    node.input[6], node.input[7] = node.input[7], node.input[6]


@paged
@pytest.mark.parametrize("change", [other_caches, other_layer, other_places])
def test_faults_of_pages(change: Callable[[GraphProto], None], tmp_path: Path) -> None:
    par = shard("gpt2_optimum", tmp_path)
    for file in par.glob("rank_*.onnx"):
        program = onnx.load(file, load_external_data=False)
        change(program.graph)
        onnx.save(program, file)
    assert not onnxpar.verify(LLM / "gpt2_optimum", par).ok


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


@pytest.mark.slow
def test_the_encoder_of_a_decoder_is_assumed(tmp_path: Path) -> None:
    """It is made of two files; a decoder that is a branch of one is refused."""
    result = onnxpar.verify(LLM / "t5", shard("t5", tmp_path))
    assert result.ok and [Path(name).name for name in result.assumed] == ["encoder"]
    with pytest.raises(onnxpar.OnnxparError, match="of an encoder-decoder that was taken apart"):
        onnxpar.verify(LLM / "bart", shard("bart", tmp_path))
