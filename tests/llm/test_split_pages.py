"""Pages of caches that are split by positions: each rank attends to what it holds, and the tokens
are those of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from committed import MODELS

import onnxpar
from onnxpar.cost.topology import Topology
from onnxpar.graph.paged_attention import too_old
from onnxpar.llm.generator import Generator

pytestmark = pytest.mark.skipif(too_old() is not None, reason=str(too_old()))
TIMEOUT = 30.0
FOLDERS = (
    "llama",
    "llama_int4",
    "qwen3",
    "phi3",
    "mistral",
    "gemma2",  # windows, scores with a cap
    "gpt_oss",  # windows, sinks
    "gpt2_optimum",
)


@pytest.mark.matrix
@pytest.mark.parametrize("page_size", [16, 2], ids="pages-of-{}".format)
@pytest.mark.parametrize("mesh", ["cp=2", "cp=3", "tp=2,cp=2"])
@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_others(name: str, mesh: str, page_size: int, tmp_path: Path) -> None:
    """A rank has no position of pages of 2 where 3 ranks split them."""
    folder, par = MODELS / "llm" / name, tmp_path / "m.par"
    onnxpar.shard(folder, par, mesh=mesh, preset="context-parallel", page_size=page_size)
    wanted = json.loads((folder / "expected.json").read_bytes())
    with Generator(par, timeout=TIMEOUT) as generator:
        alone = [generator.generate(p, max_new_tokens=128)[0].tokens for p in wanted]
        together = [c.tokens for c in generator.generate(list(wanted), max_new_tokens=128)]
    assert alone == together == list(wanted.values())


def seconds_of(page_size: int = 16, mesh: str = "cp=2", **sizes: int) -> tuple[float, float]:
    """Predicted seconds of compute and of communication."""
    all_sizes = {"texts": 1, "new_tokens": 1, "pages": 64, "pages_of_text": 32, "picks": 1} | sizes
    found = onnxpar.plan(
        MODELS / "llm" / "llama",
        mesh=mesh,
        preset="context-parallel",
        page_size=page_size,
        topology=Topology.default(),
        typical=",".join(f"{name}={size}" for name, size in all_sizes.items()),
    )
    return found.predicted.compute, found.predicted.communication


@pytest.mark.slow
def test_costs_are_those_of_pages_that_are_read() -> None:
    some = seconds_of()
    assert seconds_of(pages=6400) == pytest.approx(some), "pages of other texts cost nothing"
    longer = seconds_of(pages_of_text=512, pages=512)
    assert longer[0] > some[0] * 1.5 and longer[1] == pytest.approx(some[1])
    for new in (1, 4096):
        few = seconds_of(new_tokens=new)
        many = seconds_of(page_size=32, pages_of_text=16, pages=32, new_tokens=new)
        assert many == pytest.approx(few, rel=1e-3), "as many positions in other pages"


@pytest.mark.slow
def test_the_search_splits_positions_of_long_texts() -> None:
    """Two heads of keys are not enough for 4 ranks, and long texts take longest to read."""
    split = []
    for pages in (8, 4096):
        found = onnxpar.plan(
            MODELS / "llm" / "llama",
            mesh="tp=4",
            topology=Topology.default(),
            typical=f"texts=1,new_tokens=1,pages=4096,pages_of_text={pages}",
        )
        (cache,) = (t for t in found.inputs if t.name == "past_key_values.0.key")
        split.append([bool(dim.axes) for dim in cache.layout.dims])
    assert split == [[False] * 4, [False, False, True, False]]
