"""Models as onnxruntime's optimizers and quantizers leave them compute, split, what they do whole.

Products of integers meet before they are scaled, so a dynamically quantized model keeps its bits.
Where a sum of floats feeds a quantizer, rounding may tip over: the error is held against that of
the unsplit model when its products are scaled by one rounding.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from agreement import TIMEOUT, check_outputs, options, relative_error
from optimized_models import (
    HEADS,
    LEVELS,
    SOURCES,
    Array,
    Level,
    make_variant,
    random_feeds,
    rounding_errors,
    run_model,
    session_options,
)

from onnxpar.planner import sharder
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.threads import ThreadSession

LAYOUTS = [f"{preset} {n}" for preset in ("tensor-parallel", "data-parallel") for n in (2, 3, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the variants are written."""
    logging.disable(logging.WARNING)
    return tmp_path_factory.mktemp("variants")


make_once = functools.cache(make_variant)


@functools.cache
def sharded(model: Path, folder: Path, layout: str) -> Path:
    """The model split so, once for all media."""
    par = folder / f"{model.stem}.{layout}.par"
    sharder.shard(model, par, options(layout))
    return par


def run_split(model: Path, folder: Path, layout: str, level: object) -> list[Array]:
    """The outputs of the model split so, each rank's session at an optimization level."""
    par = sharded(model, folder, layout)
    feeds = random_feeds(onnx.load(model))
    with ThreadSession(par, session_options(level), timeout=TIMEOUT) as session:
        return [np.asarray(out) for out in session.run(None, feeds)]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("variant", [*LEVELS, "transformer"])
@pytest.mark.parametrize("source", SOURCES)
def test_optimized(source: str, variant: str, folder: Path, tmp_path: Path) -> None:
    if variant == "transformer" and source not in HEADS:
        pytest.skip("not a transformer")
    path = make_variant(source, variant, folder)
    model = onnx.load(path)
    # the runtime cannot load what it has optimized itself and optimize it once more
    wanted = run_model(model, random_feeds(model), Level.ORT_DISABLE_ALL)
    for layout in LAYOUTS:
        got = run_split(path, tmp_path, layout, Level.ORT_ENABLE_ALL)
        check_outputs(got, wanted, [o.name for o in model.graph.output])
        rank = Bundle.load(sharded(path, tmp_path, layout)).rank_file(0)
        check_fused(onnx.load(rank, load_external_data=False).graph, model.graph)


def check_fused(rank: onnx.GraphProto, whole: onnx.GraphProto) -> None:
    """An AssertionError if a rank has a convolution or a Gemm apart from the activation that was
    fused with it, without a collective in between."""
    made = {name: node for node in rank.node for name in node.output}
    for node in [n for n in whole.node if n.op_type in ("FusedConv", "FusedGemm")]:
        found = made[node.output[0]]
        assert found.op_type == node.op_type or made[found.input[0]].domain == "onnxpar", node.name


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("source", SOURCES)
def test_dynamically_quantized(source: str, folder: Path) -> None:
    path = make_once(source, "dynamic", folder)
    model = onnx.load(path)
    # fused kernels round otherwise; without them bits must agree
    level = Level.ORT_ENABLE_BASIC
    wanted = run_model(model, random_feeds(model), level)
    for layout in LAYOUTS:
        for a, b in zip(run_split(path, folder, layout, level), wanted, strict=True):
            np.testing.assert_array_equal(a, b, layout)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("source", SOURCES)
def test_statically_quantized(source: str, folder: Path, tmp_path: Path) -> None:
    path = make_variant(source, "qdq", folder)
    model = onnx.load(path)
    feeds = random_feeds(model)
    wanted = run_model(model, feeds, Level.ORT_ENABLE_ALL)
    allowed = [2 * e for e in rounding_errors(model, feeds, Level.ORT_ENABLE_ALL)]
    for layout in LAYOUTS:
        got = run_split(path, tmp_path, layout, Level.ORT_ENABLE_ALL)
        for a, b, most in zip(got, wanted, allowed, strict=True):
            assert relative_error(a, b) <= most, layout
            np.testing.assert_array_equal(a.argmax(-1), b.argmax(-1), layout)
