"""A strategy that is saved is small, and its file alone gives the same plan."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml
from committed import MODELS

from onnxpar import cli
from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.context import load_model, make_context
from onnxpar.planner.options import Options
from onnxpar.planner.save_strategy import Saver, widest_pattern
from onnxpar.search.search import solve
from onnxpar.strategy.entries import annotations_of
from onnxpar.strategy.strategy import NodeAnnotation, Strategy
from onnxpar.strategy.write_strategy import factor_entry, node_entry

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import llama_shape

CHEAP = Topology.of(
    {
        "levels": [{"name": "host", "size": 16, "latency": 1e-7, "bandwidth": 1e10}],
        "device": {"flops": 1e9, "memory_bandwidth": 1e9, "launch": 1e-8},
    }
)
"""Talking costs so little that small models are worth splitting in every way."""
SAVED = ("gpt2", "llama", "bert", "vit", "resnet", "dlrm", "mixtral")


def searched(mesh: str) -> Options:
    return Options(mesh=Mesh.parse(mesh), search="auto", topology=CHEAP, check_layouts=True)


def saved(model: Path, how: Options, folder: Path) -> tuple[Plan, Path]:
    """The plan, and the file that its strategy is saved to."""
    file = folder / "saved.yaml"
    saver = Saver(file)
    made, _ = sharder.plan(model, how, saver)
    saver.write()
    return made, file


def plan_of(made: Plan) -> dict[str, Any]:
    """All that a plan says, apart from what it was made by, and what a search proved."""
    return made.to_json() | {"preset": None, "proof": None}


def check(model: Path, how: Options, folder: Path) -> int:
    """Saves and loads; an AssertionError where the plans differ. Returns the number of entries."""
    made, file = saved(model, how, folder)
    strategy = Strategy.read(file)
    alone = Options(strategy=strategy, topology=how.topology, dims=how.dims, check_layouts=True)
    again, _ = sharder.plan(model, alone)
    assert plan_of(again) == plan_of(made)
    return len(strategy.shard) + len(strategy.tensors)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("exporter", "mesh"), [("legacy", "tp=2"), ("dynamo", "dp=2,tp=2")])
@pytest.mark.parametrize("model", SAVED)
def test_what_the_search_finds(model: str, exporter: str, mesh: str, tmp_path: Path) -> None:
    path = MODELS / f"{model}.{exporter}.static.onnx"
    entries = check(path, searched(mesh), tmp_path)
    assert entries <= len(onnx.load(path).graph.node) / 3


def test_entries_say_all_that_can_be() -> None:
    """Of every node, by the factors of its rule: pieces of dimensions and of axes among them."""
    how = searched("tp=8")
    loaded = load_model(MODELS / "llama_decode.legacy.static.onnx", how)
    sharding = make_context(loaded, how).sharding
    found = solve(loaded.graph, sharding, loaded.states)
    entries = {}
    for seed in found.annotations:
        if isinstance(seed, NodeAnnotation):
            pieces = [(seed.axes[i], None) for i in range(len(seed.op.leaves))]
            entries[seed.op.node.name] = entry = factor_entry(seed.op, pieces, sharding.mesh)
            (again,) = annotations_of(Strategy(shard={seed.op.node.name: entry}), sharding)
            assert isinstance(again, NodeAnnotation) and again.axes == seed.axes
            listed = {seed.op.node.name: node_entry(seed.op, pieces, sharding)}
            (again,) = annotations_of(Strategy(shard=listed), sharding)
            assert isinstance(again, NodeAnnotation) and again.axes.items() <= seed.axes.items()
    assert "tp:(1)4*tp:(4)2*(3+3)" in str(entries)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("vit.legacy.static.onnx", searched("tp=2")),
        ("resnet.legacy.static.onnx", Options(preset="tensor-parallel", devices=2)),
    ],
)
def test_every_entry_is_needed(model: str, how: Options, tmp_path: Path) -> None:
    made, file = saved(MODELS / model, how, tmp_path)
    data = yaml.safe_load(file.read_text())
    for name in data["shard"]:
        less = data | {"shard": {k: v for k, v in data["shard"].items() if k != name}}
        alone = Options(strategy=Strategy.of(less), topology=how.topology)
        again, _ = sharder.plan(MODELS / model, alone)
        assert plan_of(again) != plan_of(made), name


@pytest.mark.matrix
@pytest.mark.parametrize("model", SAVED)
def test_presets(model: str, tmp_path: Path) -> None:
    path = MODELS / f"{model}.legacy.static.onnx"
    preset = Options(preset="tensor-parallel", devices=2, check_layouts=True)
    assert check(path, preset, tmp_path) <= 12
    data = Options(preset="data-parallel", mesh=Mesh.parse("dp=2"))
    assert check(path, data, tmp_path) == 0


@pytest.mark.slow
def test_open_sizes(tmp_path: Path) -> None:
    """They are imagined alike where the mesh is the file's."""
    check(
        MODELS / "gpt2.legacy.dynamic.onnx",
        Options(preset="sequence-parallel", mesh=Mesh.parse("dp=2,tp=3")),
        tmp_path,
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("tp=4", {"tensors": {"logits": [None, None, "tp"]}}),
        ("dp=2,tp=2", {"tensors": {"logits": [None, "tp:(1)2", "dp"]}}),
        ("tp=2", {"tensors": {"lm_head.weight": [{"tp": [200, 312]}, None]}}),
        ("tp=2", {"tensors": {"/transformer/wte/Gather_output_0": [None, None, None]}}),
        ("a=4", {"shard": {"node_embedding": [[None, None], [None, "a:(2)2"]]}}),
    ],
)
def test_what_was_asked_for_is_saved(mesh: str, strategy: dict[str, Any], tmp_path: Path) -> None:
    how = replace(searched(mesh), strategy=Strategy.of(strategy), search="propagation")
    check(MODELS / "gpt2.dynamo.static.onnx", how, tmp_path)
    tensors = Strategy.read(tmp_path / "saved.yaml").tensors
    assert tensors.keys() >= strategy.get("tensors", {}).keys()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Llamas of so many layers, whose nodes are named by number and whose weights by layer."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden": 32, "heads": 8, "kv_heads": 4, "ffn": 48, "vocab": 64, "batch": 8, "seq": 4}
    paths = {layers: folder / f"{layers}.onnx" for layers in (4, 12)}
    for layers, path in paths.items():
        llama_shape.write(path, layers=layers, **sizes)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [searched("dp=4,tp=4"), Options(mesh=Mesh.parse("dp=2,tp=2"), preset="hybrid")]
)
def test_files_do_not_grow_with_the_layers(
    how: Options, deep: dict[int, Path], tmp_path: Path
) -> None:
    few, many = (check(path, how, tmp_path) for path in deep.values())
    assert 4 <= few == many <= 12
    text = (tmp_path / "saved.yaml").read_text()
    assert re.search(r"  \w+\.\*: \[", text) and not re.search(r"  \w+\.\d", text)


def test_a_file_is_edited(deep: dict[int, Path], tmp_path: Path) -> None:
    _, file = saved(deep[4], Options(mesh=Mesh.parse("tp=2"), preset="tensor-parallel"), tmp_path)
    text = file.read_text()
    file.write_text(text.replace("head: [null, tp]", "head: [null, null]"))
    assert text != file.read_text()
    made, _ = sharder.plan(deep[4], Options(strategy=Strategy.read(file), check_layouts=True))
    assert {w.name: w.layout_text for w in made.weights}["head"] == "[-, -]"


@pytest.mark.parametrize(
    ("name", "names", "fits", "pattern"),
    [
        ("/h.1/fc/MatMul", ("/h.0/fc/MatMul", "/h.1/fc/MatMul", "/h.0/up"), "fc", "/h.*/fc/MatMul"),
        ("fc_1", ("fc_1", "fc_2", "fc_up"), "fc_", "fc_*"),
        ("fc_1", ("fc_1", "fc_2", "fc_33"), "fc_1 fc_2", "fc_1"),
        ("a.1.b.2", ("a.1.b.2", "a.1.b.3", "a.2.b.2"), "a.1.b.2 a.1.b.3", "a.1.b.*"),
        ("h[1]", ("h[1]", "h[2]", "h1"), "h[1] h[2]", "h[[]*]"),
    ],
)
def test_patterns(name: str, names: tuple[str, ...], fits: str, pattern: str) -> None:
    assert widest_pattern(name, names, lambda n: n in fits or fits in n) == pattern


@pytest.mark.slow
def test_annotations_say_what_was_found(tmp_path: Path) -> None:
    model, how = MODELS / "gpt2.legacy.static.onnx", searched("dp=2,tp=2")
    found, _ = sharder.plan(model, how)
    sharder.annotate(model, tmp_path / model.name, how)
    again, _ = sharder.plan(tmp_path / model.name, Options(topology=CHEAP, check_layouts=True))
    assert plan_of(again) | {"metadata": None} == plan_of(found) | {"metadata": None}


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = str(MODELS / "bert.legacy.static.onnx"), str(tmp_path / "s.yaml")
    how = ["plan", model, "--mesh", "tp=2", "--preset", "tensor-parallel", "--json"]
    assert cli.main([*how, "--save-strategy", file]) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main(["plan", model, "--strategy", file, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again | {"preset": None} == found | {"preset": None}
    text = Path(file).read_text()
    assert text.startswith("# bert.legacy.static.onnx over 2 ranks, by --preset tensor-parallel.\n")
    assert list(yaml.safe_load(text)) == ["mesh", "shard"]
    par = tmp_path / "bert.par"
    assert cli.main(["shard", model, *how[2:-1], "--save-strategy", file, "-o", str(par)]) == 0
    assert f"strategy written to {file}; use it with --strategy" in capsys.readouterr().out
    assert Path(file).read_text() == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "2", "--preset", "manual"], "a manual program has no strategy to save"),
        (["--devices", "2", "--candidates"], "--save-strategy does not go with --candidates"),
    ],
)
def test_what_is_not_saved(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.yaml"
    model = str(MODELS / "gpt2.legacy.static.onnx")
    assert cli.main(["plan", model, *options, "--save-strategy", str(file)]) == 2
    assert message in capsys.readouterr().err and not file.exists()
    missing = str(tmp_path / "none" / "s.yaml")
    assert cli.main(["plan", model, "--devices", "2", "--save-strategy", missing]) == 2
    assert "no folder" in capsys.readouterr().err
