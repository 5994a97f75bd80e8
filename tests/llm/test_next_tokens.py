"""Tokens chosen of the likeliest ones: the same as of all logits, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from committed import MODELS
from onnx import TensorProto, helper

import onnxpar
from onnxpar.base.errors import ModelError
from onnxpar.llm.generator import Generator
from onnxpar.llm.next_tokens import Candidates
from onnxpar.llm.sampling import Sampling
from onnxpar.load.top_k_logits import (
    ASKED,
    ASKED_LOGITS,
    BEST,
    BEST_LOGITS,
    BEST_TOKENS,
    LOG_TOTALS,
    TEMPERATURES,
    add_candidates,
)

SIZE = 400
OPTIONS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.5},
    {"do_sample": False, "logit_bias": {7: 30.0, 11: -math.inf}},
    {"do_sample": False, "frequency_penalty": 0.7, "presence_penalty": -1.0},
    {"top_k": 0},
    {"top_k": 0, "temperature": 2.5},
    {"top_k": 0, "temperature": 0.3},
    {"top_k": 5},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 63, "min_p": 0.001},
    {"top_k": 64},
    {"top_k": 300, "top_p": 0.999},
    {"top_k": 0, "top_p": 0.9},
    {"top_k": 0, "top_p": 0.999, "temperature": 1.7},
    {"top_k": 0, "min_p": 0.05},
    {"top_k": 0, "min_p": 1e-9},
    {"top_k": 20, "repetition_penalty": 0.5, "temperature": 0.8},
    {"top_k": 0, "frequency_penalty": 1.0, "top_p": 0.95},
    {"top_k": 50, "logit_bias": {3: 5.0, 319: 20.0}},
]


def best_of(logits: np.ndarray, sampling: Sampling, seen: Sequence[int], step: int) -> Candidates:
    """The candidates that ranks would tell, by NumPy."""
    order = np.argsort(-logits, kind="stable")[:BEST]
    asked = sampling.changed(seen, step)
    below = logits.astype(float) - logits.max()
    totals = [np.log(np.exp(below / t).sum()) for t in (1, sampling.temperature or 1)]
    return Candidates.best(order, logits[order], asked, logits[asked], np.array(totals))


@pytest.mark.matrix
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 30.0])
def test_candidates_choose_as_all_logits_do(options: dict[str, Any], scale: float) -> None:
    sampling = Sampling(**{"do_sample": True, "seed": 3, **options})
    rng = np.random.default_rng(int(10 * scale))
    told = 0
    for step in range(60):
        logits = (rng.standard_normal(SIZE) * scale).astype(np.float32)
        seen = rng.integers(0, SIZE, 30 + step).tolist()
        wanted = sampling.choose(Candidates.all(logits), seen, 0, step)
        found = sampling.choose(best_of(logits, sampling, seen, step), seen, 0, step)
        assert wanted is not None
        if found is not None:
            told += 1
            assert found[0] == wanted[0]
            assert math.isclose(found[1], wanted[1], rel_tol=1e-6, abs_tol=1e-6)
    if sampling.needs_all:
        assert told == 0
    elif scale == 30 and sampling.min_p != 1e-9:
        assert told > 50  # of logits as spread as those of a trained model


def test_equal_logits_are_not_told_apart_by_candidates() -> None:
    logits = np.zeros(SIZE, np.float32)
    for options in ({"do_sample": False}, {"top_k": 3}, {"top_p": 0.5, "top_k": 0}):
        sampling = Sampling(**{"do_sample": True, **options})  # type: ignore[arg-type]
        assert sampling.choose(best_of(logits, sampling, [], 0), [], 0, 0) is None
        assert sampling.choose(Candidates.all(logits), [], 0, 0) is not None


def test_logits_that_are_no_numbers() -> None:
    for logits in ([1.0, math.nan], [-math.inf, -math.inf], [1.0, math.inf]):
        with pytest.raises(ModelError, match="not numbers"), np.errstate(invalid="ignore"):
            Sampling().choose(Candidates.all(np.array(logits, np.float32)), [], 0, 0)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "ranks,size,dtype,opset",
    [
        (1, 501, TensorProto.FLOAT, 18),
        (2, 501, TensorProto.FLOAT16, 18),
        (3, 37, TensorProto.FLOAT, 13),
        (4, 501, TensorProto.FLOAT, 12),
    ],
)
def test_ranks_tell_them_of_split_logits(
    ranks: int, size: int, dtype: int, opset: int, tmp_path: Path
) -> None:
    """A product with weights that are split over the vocabulary, which is odd."""
    rng = np.random.default_rng(ranks)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    hidden = rng.standard_normal((1, 3, 8)).astype(kind)
    weights = rng.standard_normal((8, size)).astype(kind)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["logits"], "product")],
        "g",
        [helper.make_tensor_value_info("x", dtype, [1, "picks", 8])],
        [helper.make_tensor_value_info("logits", dtype, [1, "picks", size])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    add_candidates(graph, "logits", opset)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    strategy = (
        {"mesh": {"tp": ranks}, "tensors": {"logits": [None, None, "tp"]}} if ranks > 1 else None
    )
    onnxpar.shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=ranks, strategy=strategy)
    asked = np.array([[0, size - 1], [5, 5], [size // 2, 1]])
    cool = np.array([[1.0], [0.2], [3.0]], np.float32)
    with onnxpar.InferenceSession(tmp_path / "m.par") as session:
        names = ["logits", BEST_TOKENS, BEST_LOGITS, ASKED_LOGITS, LOG_TOTALS]
        found = session.run(names, {"x": hidden, ASKED: asked, TEMPERATURES: cool})
    logits, tokens, best, told, totals = (np.asarray(f) for f in found)
    rows = logits[0].astype(np.float32)
    order = np.argsort(-rows, axis=1, kind="stable")[:, :BEST]
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(best, np.take_along_axis(rows, order, 1))
    np.testing.assert_array_equal(told, np.take_along_axis(rows, asked, 1))
    below = rows.astype(float) - rows.max(1, keepdims=True)
    wanted = [np.log(np.exp(below / t).sum(1)) for t in (1, cool)]
    np.testing.assert_allclose(totals, np.stack(wanted, 1), rtol=2e-6, atol=1e-6)


DRAWN = OPTIONS[1:14:2] + OPTIONS[14:]
"""Options that differ in how tokens are found."""


def drawn(par: Path) -> list[list[list[int]]]:
    """The tokens of two texts with each of the options."""
    found = []
    with Generator(par) as generator:
        for options in DRAWN:
            options = {"do_sample": True, "seed": 1, **options}
            texts = generator.generate([[5, 6, 7], [9, 10]], max_new_tokens=12, **options)
            found.append([text.tokens for text in texts])
    return found


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """The tokens of the unsplit model with caches of its own, chosen of all logits."""
    dense = tmp_path_factory.mktemp("drawn") / "dense.par"
    onnxpar.shard(MODELS / "llm" / "llama", dense, devices=1, page_size=0)
    return drawn(dense)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_seed_draws_the_same_on_any_number_of_ranks(
    ranks: int, wanted: list[list[list[int]]], tmp_path: Path
) -> None:
    preset = "tensor-parallel" if ranks > 1 else None
    onnxpar.shard(MODELS / "llm" / "llama", tmp_path / "m.par", devices=ranks, preset=preset)
    for options, found, expected in zip(DRAWN, drawn(tmp_path / "m.par"), wanted, strict=True):
        assert found == expected, options
