"""A model is read once for all attempts to plan it; what was seen of the best one is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from committed import MODELS
from small_models import HEAD, write_text

from onnxpar.graph.write_model import export_model
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import load
from onnxpar.planner.attempt import Attempt
from onnxpar.planner.dump import Dump
from onnxpar.planner.loader import Loader
from onnxpar.planner.observer import Observer
from onnxpar.planner.options import Options
from onnxpar.planner.planner import Planner

SHARED = ["gpt2.dynamo.static", "bert.dynamo.dynamic", "llama_decode.legacy.dynamic"]


@pytest.mark.parametrize("name", SHARED)
def test_each_attempt_gets_the_graph_of_a_file_that_is_read_anew(name: str) -> None:
    path, options = MODELS / f"{name}.onnx", Options(devices=2, preset="tensor-parallel")
    planner = Planner(Loader(path), options, Observer())
    first = planner.make(Attempt.first(options))
    assert first.plan.to_json() == planner.make(Attempt.first(options)).plan.to_json()
    fresh, anew = planner.loader.model(options), load(path)
    one, other = (export_model(m.graph, m.header, {}) for m in (fresh, anew))
    assert one == other and (fresh.states, fresh.whole) == (anew.states, anew.whole)


def test_a_file_is_read_again_for_other_sizes() -> None:
    loader, options = Loader(MODELS / "bert.dynamo.dynamic.onnx"), Options(devices=2)
    sizes = loader.model(options).sizes
    assert loader.model(options).sizes is sizes
    bound = loader.model(replace(options, dims={"batch": 2, "seq": 8}))
    assert sizes is not None and bound.sizes is None
    assert loader.model(replace(options, devices=64)).sizes not in (None, sizes)


def test_a_program_of_one_rank_is_no_model_of_all(tmp_path: Path) -> None:
    text = 'm (float[4,6] x) => (float[4,6] y) { y = onnxpar.AllReduce <axes = ["dp"]> (x) }'
    head = HEAD.replace("]>", ', "onnxpar" : 1]>')
    loader = Loader(write_text(head + text, tmp_path / "manual.onnx"))
    manual = loader.model(Options(mesh=Mesh.parse("dp=2"), preset="manual"))
    model = loader.model(Options(mesh=Mesh.parse("dp=2"), preset="data-parallel"))
    assert (
        manual.original is None and model.original is not None and model.graph is not manual.graph
    )


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_dump_is_of_the_attempt_that_is_kept(best: int, tmp_path: Path) -> None:
    path, options = MODELS / f"{SHARED[0]}.onnx", Options(devices=2)
    loader, first = Loader(path), Attempt.first(options)
    untied = replace(first, objective=replace(first.objective, untied=True))
    limited = replace(first, objective=replace(first.objective, memory=3e5))
    each = [first, untied, limited]

    def dumped(folder: Path, attempts: list[Attempt], best: int) -> dict[str, bytes]:
        dump = Dump(folder)
        planner = Planner(loader, options, dump)
        dump.keep([planner.make(attempt) for attempt in attempts][best].seen)
        return {f.name: f.read_bytes() for f in folder.glob("*.onnxtxt")}

    found = dumped(tmp_path / "all", each, best)
    assert found == dumped(tmp_path / "alone", [each[best]], 0)
    assert sorted(f.name for f in (tmp_path / "all").iterdir() if f.name.startswith(".")) == []
    assert len(found) > 9
