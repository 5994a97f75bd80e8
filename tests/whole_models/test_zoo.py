"""Every committed dynamic model, by the search and by every preset that applies, over 1 to 8 ranks,
at batches of 1, 2 and 5, with sizes that are open or bound, computes what the whole one does.

By default, some models run, each in one layout; `--zoo` runs all of it (two hours on 2 cores).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agreement import TIMEOUT, check_agrees, check_outputs, feeds_for, options, run_unsplit
from committed import DYNAMIC, MODELS, ODD, dims_of

from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.threads import ThreadSession

BATCHES = (1, 2, 5)
RANKS = (1, 2, 3, 4, 8)
PRESETS = ("", "data-parallel", "tensor-parallel", "hybrid")
"""Those that apply to any model; of none, the search decides."""
SEQUENCE = ("bert", "bert_encoder", "falcon", "gpt2", "llama", "mixtral")
"""Models to which sequence-parallel applies: their first input is a sequence."""
HYBRID = {1: "dp=1,tp=1", 2: "dp=2,tp=1", 3: "dp=1,tp=3", 4: "dp=2,tp=2", 8: "dp=2,tp=4"}


def matrix(model: str) -> Iterator[tuple[str, str]]:
    """A model's layouts, each with `open` and `bound`."""
    applies = [*PRESETS, *(["sequence-parallel"] if model.split(".")[0] in SEQUENCE else [])]
    for preset in applies:
        for ranks in RANKS:
            layout = f"{preset} {HYBRID[ranks] if preset == 'hybrid' else ranks}".strip()
            yield from ((layout, sizes) for sizes in ("open", "bound"))


def slice_of(number: int, model: str) -> tuple[str, str]:
    """One of a model's layouts; over all models, each preset and number of ranks is among them."""
    layouts = list(matrix(model))
    return layouts[7 * number % len(layouts)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.getoption("zoo"):
        cases = [(m, *layout) for m in DYNAMIC for layout in matrix(m)]
    else:
        cases = [(m, *slice_of(i, m)) for i, m in enumerate(DYNAMIC)]
    metafunc.parametrize(("model", "layout", "sizes"), cases, ids=["-".join(c) for c in cases])


@pytest.mark.slow
@pytest.mark.matrix
def test_agrees(model: str, layout: str, sizes: str, tmp_path: Path) -> None:
    path = MODELS / model
    if sizes == "open":
        check_open(path, tmp_path / "m.par", options(layout))
        return
    for batch in BATCHES:
        dims = dims_of(model, {**ODD, "batch": batch})
        folder = tmp_path / str(batch)
        folder.mkdir()
        check_agrees(path, folder, options(layout, dims=dims))


def check_open(model: Path, par: Path, how: Options) -> None:
    """One folder, at every batch."""
    plan = sharder.shard(model, par, how)
    names = [port.name for port in plan.outputs]
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for batch in BATCHES:
            dims = dims_of(model.name, {**ODD, "batch": batch})
            bound, _ = sharder.plan(model, Options(devices=1, preset="tensor-parallel", dims=dims))
            feeds = feeds_for(bound)
            check_outputs(session.run(None, feeds), run_unsplit(model, feeds), names)
