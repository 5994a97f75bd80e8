"""Whole models of onnxruntime's own ops, as its optimizers and exporters write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import check_agrees, options
from onnx import numpy_helper

HEAD = '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>\n'

IMAGE = """fused (float[4,6,5,5] x, float[8,6,3,3] w1, float[8] w2, float[4,8,3,3] z,
  float[6,8,1,1] w3) => (float[4,6,3,3] y)
{ h = com.microsoft.FusedConv<activation = "Relu">(x, w1, w2, z)
  y = com.microsoft.FusedConv<activation = "Clip", activation_params = [-0.5, 1.5]>(h, w3) }"""
GEMM = """fused (float[4,6] x, float[8,6] w1, float[8] w2, float[8,6] w3, float[6] w4)
  => (float[4,6] y)
{ h = com.microsoft.FusedGemm<activation = "LeakyRelu", activation_alpha = 0.3, transB = 1>
      (x, w1, w2)
  y = com.microsoft.FusedGemm<activation = "Tanh", alpha = 0.5, beta = 2.0>(h, w3, w4) }"""
DYNAMIC = """dynamic (float[4,6] x, uint8[6,8] w1, float[8] w2, uint8[8] w3, float[8] w4,
  uint8[8,6] w5, float w6) => (float[4,6] y)
{ h = com.microsoft.DynamicQuantizeMatMul(x, w1, w2, w3, w4)
  y = com.microsoft.DynamicQuantizeMatMul(h, w5, w6) }"""
PAIR = """pair (float[4,6] x, uint8[6,8] w1, float[8] w2, uint8[8] w3, float[8] w4,
  uint8[6,8] w5, float w6) => (float[4,8] y)
{ h = com.microsoft.DynamicQuantizeMatMul(x, w1, w2, w3, w4)
  g = com.microsoft.DynamicQuantizeMatMul(x, w5, w6)
  y = Mul(h, g) }"""
UPDATED = """updated (float[4,6] x, uint8[6,8] w5, float w6, float[4,8] r) => (float[4,8] y)
{ g = com.microsoft.DynamicQuantizeMatMul(x, w5, w6)
  a = Mul(g, g)
  b = Add(a, r)
  c = Sub(b, g)
  y = Mul(c, b) }"""
SCALED = """scaled (float[4,8] x, uint8[8,6] w1, float w2, uint8 w3, float[6] w4)
  => (float[4,6] y)
{ a, s, z = DynamicQuantizeLinear(x)
  y = com.microsoft.MatMulIntegerToFloat(a, w1, s, w2, z, w3, w4) }"""
BITS = """bits (float[4,64] x, uint8[6,4,8] w1, float[6,4] w2, uint8[6,2] w3, float[6] w4)
  => (float[4,6] y)
{ h = com.microsoft.MatMulNBits<N = 6, K = 64, bits = 4, block_size = 16>(x, w1, w2, w3, "", w4)
  y = Relu(h) }"""
ENCODER = """encoder (int32[4,6] ids, int32[4,6] kinds, int32[4] lengths, float[9,12] w1,
  float[6,12] w2, float[2,12] w3, float[12] w4, float[12] w5, float[12,36] w6, float[36] w7,
  float[12,12] w8, float[12] w9, float[12,24] wa, float[24] wb, float[24,12] wc, float[12] wd)
  => (float[4,6,12] y)
{ e, i = com.microsoft.EmbedLayerNormalization(ids, kinds, w1, w2, w3, w4, w5)
  a = com.microsoft.Attention<num_heads = 4>(e, w6, w7, lengths)
  o = MatMul(a, w8)
  s = com.microsoft.SkipLayerNormalization(o, e, w4, w5, w9)
  m = MatMul(s, wa)
  g = com.microsoft.BiasGelu(m, wb)
  f = MatMul(g, wc)
  y = com.microsoft.SkipLayerNormalization(f, s, w5, w4, wd) }"""
FEATURES = """features (int32[4,6] ids, int32[4,6] kinds, float[9,12] w1, float[6,12] w2,
  float[2,12] w3, float[12] w4, float[12] w5, float[12,12] w6) => (float[4,6,12] y)
{ e, i = com.microsoft.EmbedLayerNormalization(ids, kinds, w1, w2, w3, w4, w5)
  m = MatMul(e, w6)
  y = com.microsoft.SkipLayerNormalization(m, e, w5, w4) }"""
GROWN = """grown (float[2,4,6,5] x, float[4,6,3,3] w1, float[6] w2) => (float[2,6,13,11] y)
<int64[4] pads = {0, 1, 0, 1}>
{ h = com.microsoft.ConvTransposeWithDynamicPads<strides = [2, 2]>(x, w1, pads, w2)
  y = Relu(h) }"""
DECODER = """decoder (float[4,1,32] x, float[4,2,5,16] k, float[4,2,5,16] v, int32[4] lengths,
  float[32] w1, uint8[128,2,8] w2, float[128,2] w3, float[9,8] w4, float[9,8] w5, float[64,32] w6)
  => (float[4,1,32] y, float[4,2,6,16] K, float[4,2,6,16] V)
<int32 total = {6}>
{ n = SimplifiedLayerNormalization<axis = -1, epsilon = 0.00001>(x, w1)
  q = com.microsoft.MatMulNBits<N = 128, K = 32, bits = 4, block_size = 16>(n, w2, w3)
  a, K, V = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1>
      (q, "", "", k, v, lengths, total, w4, w5)
  o = MatMul(a, w6)
  y = com.microsoft.SkipSimplifiedLayerNormalization(o, x, w1) }"""

DYNAMIC_NODES = ("DynamicQuantizeMatMul_h", "DynamicQuantizeMatMul_y")
CHANNELS = [[None, "tp", None, None]]
CASES = {
    "channels of an image": (
        IMAGE,
        "tp=2",
        {"FusedConv_*": CHANNELS},
    ),
    "batch of images": (IMAGE, "data-parallel 3", {}),
    "images": (IMAGE, "tensor-parallel 3", {}),
    "gemm": (GEMM, "tp=3", {"FusedGemm_*": [[None, "tp"]]}),
    "rows": (GEMM, "data-parallel 3", {}),
    "dynamic": (DYNAMIC, "tp=3", {key: [[None, "tp"]] for key in DYNAMIC_NODES}),
    "dynamic rows": (DYNAMIC, "hybrid dp=2,tp=2", {}),
    "dynamic columns": (
        PAIR,
        "tp=3",
        {f"DynamicQuantizeMatMul_{y}": [[None, None], [None, "tp"]] for y in "hg"},
    ),
    "dynamic columns before a loop": (
        UPDATED,
        "tp=2",
        {"DynamicQuantizeMatMul_g": [[None, None], [None, "tp"]]},
    ),
    "scaled": (SCALED, "tp=2", {"MatMulIntegerToFloat_y": [[None, "tp"]]}),
    "scaled rows": (SCALED, "data-parallel 3", {}),
    "bits": (BITS, "tp=2", {"MatMulNBits_h": [[None, "tp"]]}),
    "columns of bits": (BITS, "tp=3", {"MatMulNBits_h": [[None, None], ["tp", None, None]]}),
    "encoder": (ENCODER, "tensor-parallel 3", {}),
    "encoder over 4": (ENCODER, "tensor-parallel 4", {}),
    "encoder of a batch": (ENCODER, "hybrid dp=2,tp=2", {}),
    "features": (
        FEATURES,
        "tp=3",
        {
            "EmbedLayerNormalization_e": [[None, None]] * 2 + [[None, "tp"]],
            "SkipLayerNormalization_*": [[None, None, "tp"]],
        },
    ),
    "words": (
        FEATURES,
        "tp=2",
        {
            "EmbedLayerNormalization_e": [[None, None]] * 2 + [["tp", None]],
            "MatMul_m": [[None, None, None], [None, "tp"]],
        },
    ),
    "rows of a grown image": (
        GROWN,
        "tp=3",
        {"ConvTransposeWithDynamicPads_h": [[None, None, "tp", None]]},
    ),
    "decoder": (DECODER, "tensor-parallel 2", {}),
    "decoder of a batch": (DECODER, "data-parallel 3", {}),
}

FUSED = {
    "channels of an image": 0,
    "batch of images": 2,
    "images": 1,  # the second one sums over ranks
    "gemm": 0,
    "rows": 2,
    "dynamic": 0,
    "dynamic rows": 0,  # the range of all rows decides
    "dynamic columns": 2,
    "dynamic columns before a loop": 1,
    "scaled": 0,
    "scaled rows": 1,
}
"""Ops that the loader takes apart, in the graph of each rank."""
APART = {"FusedConv", "FusedGemm", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"}


def write(text: str, path: Path) -> None:
    """Saves a model, inputs of which the name starts with `w` as weights drawn by their names."""
    model = onnx.parser.parse_model(HEAD + text)
    for port in [i for i in model.graph.input if i.name.startswith("w")]:
        rng = np.random.default_rng([*port.name.encode()])
        shape = [d.dim_value for d in port.type.tensor_type.shape.dim]
        if port.type.tensor_type.elem_type == onnx.TensorProto.UINT8:
            value = rng.integers(0, 256, shape, np.uint8)
        else:
            value = (rng.standard_normal(shape) * 0.3).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), port.name))
        model.graph.input.remove(port)
    onnx.save(model, path)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", CASES)
def test_agrees(name: str, tmp_path: Path) -> None:
    text, layout, shard = CASES[name]
    path = tmp_path / "m.onnx"
    write(text, path)
    plan = check_agrees(
        path, tmp_path, options(layout, strategy={"shard": shard} if shard else None)
    )
    assert not plan.whole
    for file in (tmp_path / "model.par").glob("rank_*.onnx"):
        ops = [node.op_type for node in onnx.load(file, load_external_data=False).graph.node]
        assert sum(op in APART for op in ops) == FUSED.get(name, 0)
