"""What tensor-parallel finds in real exports: column then row, whole heads, split vocabularies."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod

import onnx
import pytest
from agreement import options
from committed import MODELS, STATIC

from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder
from onnxpar.rules.notation import expr_vars

LAYERS = 2
RANKS = (2, 3, 4, 8)


@cache
def tensor_parallel(model: str, ranks: int) -> Plan:
    """The plan of a committed model."""
    return sharder.plan(MODELS / model, options(f"tensor-parallel {ranks}"))[0]


def kinds(plan: Plan) -> dict[str, int]:
    """Collectives by kind."""
    return dict(Counter(c.kind for c in plan.collectives))


def exports(*names: str) -> list[str]:
    """All static exports of these models."""
    return [m for m in STATIC if m.split(".")[0] in names]


def matrix(models: list[str]) -> list[tuple[str, int]]:
    """(model, ranks) parameters."""
    return [(m, r) for m in models for r in RANKS]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "ranks"),
    matrix(exports("gpt2", "gpt2_fp16", "gpt2_vocab50257", "llama", "llama_decode", "mixtral")),
)
def test_decoders_reduce_twice_a_layer_and_once_for_the_embedding(model: str, ranks: int) -> None:
    plan = tensor_parallel(model, ranks)
    assert kinds(plan) == {"AllReduce": 2 * LAYERS + 1}
    check_logits_stay_split(plan)


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "ranks"), matrix(exports("falcon", "gpt_neox")))
def test_parallel_blocks_reduce_once_a_layer(model: str, ranks: int) -> None:
    plan = tensor_parallel(model, ranks)
    assert kinds(plan) == {"AllReduce": LAYERS + 1}
    check_logits_stay_split(plan)


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "ranks"), matrix(exports("bert_encoder")))
def test_bert_reduces_twice_a_layer_and_once_for_the_embeddings(model: str, ranks: int) -> None:
    plan = tensor_parallel(model, ranks)
    assert kinds(plan) == {"AllReduce": 2 * LAYERS + 1}
    pooled = plan.outputs[1].layout
    assert pooled is not None and pooled.text(plan.mesh) == "[-, tp]"


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "ranks"), matrix(exports("bert")))
def test_bert_reduces_once_more_for_its_classifier(model: str, ranks: int) -> None:
    """Pooler by columns, classifier by rows: 5 labels do not split over 8."""
    plan = tensor_parallel(model, ranks)
    assert kinds(plan) == {"AllReduce": 2 * LAYERS + 2}
    assert plan.collectives[-1].tensor == plan.outputs[0].name.split("@")[0]


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "ranks"), matrix(exports("bert_encoder")))
def test_an_encoder_reduces_twice_a_layer_and_once_for_the_embedding(
    model: str, ranks: int
) -> None:
    assert kinds(tensor_parallel(model, ranks)) == {"AllReduce": 2 * LAYERS + 1}


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "ranks"), matrix(exports("t5")))
def test_t5_reduces_per_block(model: str, ranks: int) -> None:
    """Two embeddings, two blocks a layer in the encoder, three in the decoder."""
    plan = tensor_parallel(model, ranks)
    assert kinds(plan) == {"AllReduce": 2 + 2 * LAYERS + 3 * LAYERS}


def check_logits_stay_split(plan: Plan) -> None:
    """The last dimension of the first output is split over all ranks."""
    layout = plan.outputs[0].layout
    assert layout is not None
    assert layout.text(plan.mesh) == "[-, -, tp]"


SMALL = 1024
"""Elements up to which a weight may be held whole."""
STORED = "its weight is split in storage only: to gather that moves less than to gather the result"
MAY_STAY_WHOLE = {
    "resnet": STORED,
    "resnet_fp16": STORED,
}
"""Models with products and convolutions that stay whole though their weight is not small."""


def whole_products(model: str, ranks: int) -> list[str]:
    """The products and convolutions of a plan that stay whole, but for those of small weights."""
    plan, ctx = sharder.plan(MODELS / model, options(f"tensor-parallel {ranks}"))
    found = []
    for node in plan.whole:
        rule = ctx.sharding.factors.op(node.node).rule
        weight = {v for expr in rule.inputs[1] or () for v in expr_vars(expr)}
        if prod(rule.sizes[v] or 1 for v in weight) > SMALL:
            found.append(node.node)
    return found


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("model", "ranks"), matrix(STATIC))
def test_no_product_stays_whole(model: str, ranks: int) -> None:
    whole = whole_products(model, ranks)
    assert not whole or (model.split(".")[0] in MAY_STAY_WHOLE and len(whole) <= 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAY_STAY_WHOLE)
def test_nothing_is_excused_without_need(name: str) -> None:
    assert any(whole_products(model, ranks) for model in exports(name) for ranks in RANKS)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("model", "ranks"), matrix(STATIC))
def test_each_rank_holds_its_share_of_the_weights(model: str, ranks: int) -> None:
    assert large_share(tensor_parallel(model, ranks)) <= 1 / ranks + 0.05


@pytest.mark.matrix
@pytest.mark.parametrize("model", STATIC)
def test_a_hybrid_shares_the_weights_over_its_tensor_axis(model: str) -> None:
    plan, _ = sharder.plan(MODELS / model, options("hybrid dp=2,tp=3"))
    assert large_share(plan) <= 1 / 3 + 0.05


def large_share(plan: Plan) -> float:
    """The share of the bytes of all weights that are not small which the fullest rank holds."""
    large = [w for w in plan.weights if prod(w.shape) > SMALL]
    return sum(w.bytes_per_rank for w in large) / sum(w.bytes for w in large)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "ranks"), matrix(exports("gpt2", "llama", "bert", "t5", "vit", "falcon", "gpt_neox"))
)
def test_each_rank_computes_its_share_of_a_transformer(model: str, ranks: int) -> None:
    flops = tensor_parallel(model, ranks).flops
    uneven = 0.04 if ranks == 3 else 0.025  # 8 heads over 3 are 3, 3 and 2
    assert flops["per_rank"] <= (1 / ranks + uneven) * flops["model"]


def test_flops_count_what_a_convolution_multiplies() -> None:
    """The model's convolutions and its classifier, from the shapes that ONNX infers."""
    path = MODELS / "resnet.dynamo.static.onnx"
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    ports = [*model.graph.value_info, *model.graph.output]
    shapes = {p.name: [d.dim_value for d in p.type.tensor_type.shape.dim] for p in ports}
    shapes |= {w.name: list(w.dims) for w in model.graph.initializer}
    products = [n for n in model.graph.node if n.op_type in ("Conv", "Gemm")]
    counted = sum(2 * prod(shapes[n.output[0]]) * prod(shapes[n.input[1]][1:]) for n in products)
    assert tensor_parallel(path.name, 2).flops["model"] == counted
