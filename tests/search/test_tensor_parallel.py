"""What tensor-parallel finds in real exports: column then row, whole heads, split vocabularies."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod

import pytest
from agreement import options
from committed import MODELS, STATIC

from onnxpar import pipeline
from onnxpar.plan import Plan

LAYERS = 2
RANKS = (2, 3, 4, 8)


@cache
def tensor_parallel(model: str, ranks: int) -> Plan:
    """The plan of a committed model."""
    return pipeline.plan(MODELS / model, options(f"tensor-parallel {ranks}"))[0]


def kinds(plan: Plan) -> dict[str, int]:
    """Collectives by kind."""
    return dict(Counter(c.kind for c in plan.collectives))


def exports(*names: str) -> list[str]:
    """All static exports of these models."""
    return [m for m in STATIC if m.split(".")[0] in names]


def matrix(models: list[str], unless: dict[tuple[str, int], str] | None = None) -> list[object]:
    """(model, ranks) parameters; those in `unless` are known to fall short, and why."""
    return [
        pytest.param(m, r, marks=pytest.mark.xfail(strict=True, reason=reason) if reason else ())
        for m in models
        for r in RANKS
        for reason in [(unless or {}).get((m, r))]
    ]


@pytest.mark.parametrize(
    ("model", "ranks"),
    matrix(exports("gpt2", "gpt2_fp16", "gpt2_vocab50257", "llama", "llama_decode", "mixtral")),
)
def test_decoders_reduce_twice_a_layer_and_once_for_the_embedding(model: str, ranks: int) -> None:
    plan = tensor_parallel(model, ranks)
    assert kinds(plan) == {"AllReduce": 2 * LAYERS + 1}
    check_logits_stay_split(plan)


@pytest.mark.parametrize(("model", "ranks"), matrix(exports("falcon", "gpt_neox")))
def test_parallel_blocks_reduce_once_a_layer(model: str, ranks: int) -> None:
    plan = tensor_parallel(model, ranks)
    assert kinds(plan) == {"AllReduce": LAYERS + 1}
    check_logits_stay_split(plan)


@pytest.mark.parametrize(("model", "ranks"), matrix(exports("bert_encoder")))
def test_bert_reduces_twice_a_layer_and_once_for_the_embeddings(model: str, ranks: int) -> None:
    plan = tensor_parallel(model, ranks)
    assert kinds(plan) == {"AllReduce": 2 * LAYERS + 1}
    pooled = plan.outputs[1].layout
    assert pooled is not None and pooled.text(plan.mesh) == "[-, tp]"


@pytest.mark.parametrize(("model", "ranks"), matrix(exports("bert")))
def test_bert_reduces_once_more_for_its_classifier(model: str, ranks: int) -> None:
    """Pooler by columns, classifier by rows: 5 labels do not split over 8."""
    plan = tensor_parallel(model, ranks)
    assert kinds(plan) == {"AllReduce": 2 * LAYERS + 2}
    assert plan.collectives[-1].tensor == plan.outputs[0].name.split("@")[0]


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


MOST_WHOLE: dict[tuple[str, int], str] = {
    **{(m, r): "" for m in exports("mixtral") for r in RANKS},
}


def large_share(plan: Plan) -> float:
    """The share of the bytes of all initializers over 1,024 elements that the fullest rank holds."""
    large = [w for w in plan.weights if prod(w.shape) > 1024]
    return sum(w.bytes_per_rank for w in large) / sum(w.bytes for w in large)
