"""ONNX's multi-device annotations: read as strategies, and written so that they read the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from agreement import check_outputs, feeds_for, options, reference, run_ranks, run_unsplit
from committed import MODELS
from small_models import write_text

from onnxpar import cli
from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.graph.annotations import TensorSharding, clear_annotations
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.strategy.device_lists import Digit, devices_of, mesh_of_digits, shard_digits
from onnxpar.strategy.strategy import Strategy

HEAD = '<ir_version: 11, opset_import: ["" : 17]>\n'
MLP = """mlp (float[8,16] x, float[16,12] w, float[12,16] v) => (float[8,16] y)
{ [up] h = MatMul(x, w)  [act] r = Relu(h)  [down] y = MatMul(r, v) }"""
HEADS = """heads (float[2,24,5] x, float[5,7] w) => (float[2,4,6,7] z)
{ [mm] y = MatMul(x, w)  s = Constant<value = int64[4] {2, 4, 6, 7}>()  [cut] z = Reshape(y, s) }"""
Spec = tuple[str, Sequence[int | tuple[int, ...]], Mapping[int, Any]]
"""Tensor, device entries (a tuple is a group of replicas), shards or components by axis."""


def annotated(folder: Path, text: str, devices: int, nodes: Mapping[str, Sequence[Spec]]) -> Path:
    """Saves a model of ONNX text with annotations by node; v and w become weights."""
    path = write_text(HEAD + text, folder / "model.onnx", "wv")
    model = onnx.load(path)
    model.configuration.add(name="mine", num_devices=devices)
    for node in model.graph.node:
        if node.name in nodes:
            entry = node.device_configurations.add(configuration_id="mine")
            entry.sharding_spec.extend(_spec(*spec) for spec in nodes[node.name])
    onnx.save(model, path)
    return path


def _spec(
    tensor: str, devices: Sequence[int | tuple[int, ...]], dims: Mapping[int, Any]
) -> onnx.ShardingSpecProto:
    held = tuple(d if isinstance(d, tuple) else (d,) for d in devices)
    split = {a: ((None, n),) if isinstance(n, int) else n for a, n in dims.items()}
    return TensorSharding(tensor, held, split).to_proto()


def check(path: Path, how: Options, model: Path | None = None) -> Plan:
    """Shards, runs, and compares with the model, which is the annotated one by default."""
    par = path.parent / "model.par"
    plan = sharder.shard(path, par, how)
    feeds = feeds_for(plan)
    check_outputs(run_ranks(par, feeds), run_unsplit(model or path, feeds), _names(plan))
    return plan


def _names(plan: Plan) -> list[str]:
    return [p.name for p in plan.outputs]


def layouts(plan: Plan) -> dict[str, str]:
    """Of inputs, outputs and weights."""
    ports = {p.name: p.layout.text(plan.mesh) for p in (*plan.inputs, *plan.outputs) if p.layout}
    return ports | {w.name: w.layout_text for w in plan.weights}


def kinds(plan: Plan) -> list[tuple[str, str]]:
    return [(c.kind, c.tensor) for c in plan.collectives]


CHECKED = Options(check_layouts=True)
ALL = ((0, 1, 2, 3),)


def test_columns_then_rows(tmp_path: Path) -> None:
    """The mesh, and what is whole, come from the annotation."""
    nodes = {
        "up": [("w", [0, 1, 2, 3], {1: 4}), ("h", [0, 1, 2, 3], {-1: 4}), ("x", ALL, {})],
        "down": [("r", [0, 1, 2, 3], {1: 4}), ("y", ALL, {})],
    }
    plan = check(annotated(tmp_path, MLP, 4, nodes), CHECKED)
    assert str(plan.mesh) == "d=4"
    assert layouts(plan) == {"x": "[-, -]", "y": "[-, -]", "w": "[-, d]", "v": "[d, -]"}
    assert kinds(plan) == [("AllReduce", "y")]


def test_a_result_in_another_layout_than_the_node_makes(tmp_path: Path) -> None:
    """k is split, and the rows of the result: a reduce-scatter."""
    nodes = {"down": [("r", [0, 1], {1: 2}), ("y", [0, 1], {0: 2})]}
    plan = check(annotated(tmp_path, MLP, 2, nodes), CHECKED)
    assert kinds(plan) == [("ReduceScatter", "y")]
    assert layouts(plan)["y"] == "[d, -]"


def test_devices_that_number_the_mesh_axes_in_another_order(tmp_path: Path) -> None:
    """Rows over the minor axis, columns over the major one; replicas on pairs beside them."""
    nodes = {
        "up": [("x", [(0, 2), (1, 3)], {0: 2}), ("w", [(0, 1), (2, 3)], {1: 2})],
        "act": [("h", [0, 2, 1, 3], {0: 2, 1: 2})],
    }
    plan = check(annotated(tmp_path, MLP, 4, nodes), CHECKED)
    assert str(plan.mesh) == "d0=2,d1=2"
    assert (layouts(plan)["x"], layouts(plan)["w"]) == ("[d1, -]", "[-, d0]")
    assert kinds(plan) == [("AllReduce", "y")]


def test_counts_without_devices_are_a_row_major_view(tmp_path: Path) -> None:
    nodes = {"up": [("x", [], {0: 2}), ("w", [], {1: 3})]}
    plan = check(annotated(tmp_path, MLP, 6, nodes), CHECKED)
    assert (layouts(plan)["x"], layouts(plan)["w"]) == ("[d:(1)2, -]", "[-, d:(2)3]")


def test_components_of_merged_dimensions(tmp_path: Path) -> None:
    """The inner one of (4 6) is split, which the first to divide would not be."""
    nodes = {"cut": [("y", [0, 1], {1: ((4, 1), (6, 2))})]}
    plan = check(annotated(tmp_path, HEADS, 2, nodes), CHECKED)
    assert layouts(plan)["z"] == "[-, -, d, -]"
    assert layouts(plan)["x"] == "[-, 4*d, -]"


def test_a_strategy_adds_to_annotations_and_must_agree(tmp_path: Path) -> None:
    nodes = {"up": [("w", [(0, 1), (2, 3)], {1: 2})]}
    path = annotated(tmp_path, MLP, 4, nodes)
    mesh = Mesh.parse("a=2,b=2")
    more = Strategy.of({"shard": {"up": [["b", None], [None, "a"]]}})
    plan = check(path, Options(mesh=mesh, strategy=more, check_layouts=True))
    assert (layouts(plan)["x"], layouts(plan)["w"]) == ("[b, -]", "[-, a]")
    other = Strategy.of({"shard": {"up": [[None, None], [None, "b"]]}})
    with pytest.raises(StrategyError, match=r"MatMul 'up', tensor 'w'.*over b.*annotation over a"):
        sharder.plan(path, Options(mesh=mesh, strategy=other))
    ignored = sharder.plan(path, Options(mesh=mesh, strategy=other, configuration="none"))[0]
    assert layouts(ignored)["w"] == "[-, b]"


def test_a_preset_decides_what_annotations_leave_open(tmp_path: Path) -> None:
    nodes = {"up": [("w", [(0, 1), (2, 3)], {1: 2})]}
    path = annotated(tmp_path, MLP, 4, nodes)
    mesh = Mesh.parse("tp=2,dp=2")
    plan = check(path, Options(mesh=mesh, preset="hybrid", check_layouts=True))
    assert (layouts(plan)["x"], layouts(plan)["w"]) == ("[dp, -]", "[-, tp]")


@pytest.mark.parametrize(
    "devices, nodes, how, message",
    [
        (4, {"up": [("w", [0, 1], {1: 2})]}, {}, r"MatMul 'up', tensor 'w'.*\[0, 1\].*4 devices"),
        (2, {"up": [("w", [0, 1], {1: 4})]}, {}, "2 entries of device for 4 shards"),
        (2, {"up": [("q", [0, 1], {1: 2})]}, {}, "tensor 'q': the annotation names a tensor"),
        (4, {"up": [("w", [3, 2, 1, 0], {1: 4})]}, {}, "MatMul 'up', tensor 'w'.*no order of"),
        (
            2,
            {"up": [("w", [0, 1], {5: 2})]},
            {},
            r"'w': has 2 dimensions, but its annotation is for dimensions \[5\]",
        ),
        (
            2,
            {"up": [("w", [0, 1], {1: ((9, 2),)})]},
            {},
            r"12 elements along axis 1, but .* are \[9\]",
        ),
        (
            2,
            {"up": [("x", [0, 1], {1: 2}), ("w", [(0, 1)], {})]},
            {},
            "MatMul 'up', tensor 'w': k is split over -, but in the tensors before it over d",
        ),
        (
            6,
            {
                "up": [("w", [(0, 1, 2), (3, 4, 5)], {1: 2})],
                "down": [("r", [(0, 1), (2, 3), (4, 5)], {1: 3})],
            },
            {},
            "'up', tensor 'w' and MatMul 'down', tensor 'r': no mesh of 6 devices",
        ),
        (
            2,
            {"up": [("w", [0, 1], {1: 2})]},
            {"devices": 4},
            r"0 of the model's .* fit 4 ranks.*'mine' of 2 devices",
        ),
        (
            2,
            {},
            {"configuration": "yours"},
            "yours: the model has no such configuration; its configurations: 'mine'",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, devices: int, nodes: Any, how: dict[str, Any], message: str
) -> None:
    path = annotated(tmp_path, MLP, devices, nodes)
    with pytest.raises(StrategyError, match=message):
        sharder.plan(path, Options(**how))


def test_device_lists_and_meshes() -> None:
    mesh = Mesh.parse("a=2,b=3,c=2")
    for names in ("abc", "cab", "b", "ca", ""):
        axes = tuple(mesh.axis(n) for n in names)
        held = devices_of(axes, mesh)
        digits = shard_digits(held, [a.size for a in axes], "it")
        assert digits == [[Digit(a.size, {"a": 6, "b": 2, "c": 1}[a.name])] for a in axes]
    assert shard_digits([[0], [2], [1], [3]], [4], "it") == [[Digit(2, 1), Digit(2, 2)]]
    assert str(mesh_of_digits(12, [("x", Digit(2, 6)), ("y", Digit(3, 2))])) == "d0=2,d1=3,d2=2"
    for wrong in ([[0, 3], [1, 2]], [[1], [0]], [[0], [1], [3], [2]]):
        with pytest.raises(StrategyError, match="no order of mesh axes"):
            shard_digits(wrong, [len(wrong)], "it")


ROUND_TRIPS = [
    ("gpt2.dynamo.static.onnx", "tensor-parallel 3"),  # uneven heads
    ("falcon.legacy.static.onnx", "hybrid dp=2,tp=2"),  # segments of which some are split
    ("llama_decode.dynamo.dynamic.onnx", "tensor-parallel 4"),  # open sizes, states, half heads
    ("unet.dynamo.static.onnx", "hybrid dp=2,tp=2"),
]


def decided(plan: Plan) -> dict[str, Any]:
    """A plan without what the model says of itself, to which annotations add, and without what its
    runs take, which only whole plans have."""
    left_out = ("metadata", "predicted", "notes")
    return {key: value for key, value in plan.to_json().items() if key not in left_out}


@pytest.mark.matrix
@pytest.mark.parametrize("name, layout", ROUND_TRIPS)
def test_an_annotated_model_shards_as_the_plan_it_has(
    tmp_path: Path, name: str, layout: str
) -> None:
    path = tmp_path / name
    how = options(layout)
    sharder.annotate(MODELS / name, path, how)
    again, wanted = (sharder.plan(p, o)[0] for p, o in ((path, CHECKED), (MODELS / name, how)))
    assert decided(again) | {"preset": wanted.preset} == decided(wanted)
    onnx.checker.check_model(path)
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 4
    ort.InferenceSession(path, quiet, providers=["CPUExecutionProvider"])


def test_the_standard_alone_shards_correctly(tmp_path: Path) -> None:
    """Without the metadata another tool's user sees the same splits, if not the axes' names."""
    name = "gpt2.dynamo.static.onnx"
    path = tmp_path / name
    plan = sharder.annotate(MODELS / name, path, options("hybrid dp=2,tp=2"))
    model = onnx.load(path)
    for holder in (model, *model.graph.node):
        del holder.metadata_props[:]
    onnx.save(model, path)
    again = sharder.shard(path, tmp_path / "model.par", CHECKED)
    assert str(again.mesh) == "d0=2,d1=2"
    assert len(again.collectives) == len(plan.collectives) > 0
    feeds, wanted = reference(MODELS / name)
    check_outputs(run_ranks(tmp_path / "model.par", feeds), wanted, _names(again))


def test_what_the_standard_cannot_say_is_metadata(tmp_path: Path) -> None:
    """Sizes by hand, names of axes, pending sums, tensors that were asked for; and an edit of the
    annotation that leaves the metadata behind is an error."""
    path = annotated(tmp_path, MLP, 2, {})
    up, down = [[None, None], [None, {"tp": [5, 7]}]], [[None, {"tp": [5, 7]}], ["tp", None]]
    asked = {"mesh": {"tp": 2}, "shard": {"up": up, "down": down}, "tensors": {"y": ["tp", None]}}
    how = Options(strategy=Strategy.of(asked), configuration="none", check_layouts=True)
    written = tmp_path / "annotated.onnx"
    plan = sharder.annotate(path, written, how)
    assert decided(plan) == decided(check(written, CHECKED, path)) | {"model": plan.model}
    model = onnx.load(written)
    node = next(n for n in model.graph.node if n.name == "down")
    metadata = {p.key: p.value for p in node.metadata_props}
    assert json.loads(metadata["onnxpar.partial"]) == {"y": "sum(tp)"}
    assert list(json.loads(metadata["onnxpar.parts"]).values()) == [[5, 7]]
    own = {p.key: p.value for p in model.metadata_props}
    assert own == {"onnxpar.mesh": "tp=2", "onnxpar.tensors": '{"y": ["tp", "-"]}'}
    spec = next(s for s in node.device_configurations[0].sharding_spec if s.tensor_name == "r")
    spec.device[:] = [-1, -1]
    del spec.device[1:]
    spec.index_to_device_group_map.add(key=-1, value=[0, 1])
    del spec.sharded_dim[:]
    onnx.save(model, written)
    with pytest.raises(StrategyError, match=r"MatMul 'down': .*onnxpar.axes disagree"):
        sharder.plan(written, CHECKED)
    clear_annotations(model)
    assert not model.configuration and not model.metadata_props


def test_pipeline_stages_are_hints(tmp_path: Path) -> None:
    path = annotated(tmp_path, MLP, 2, {"up": [("w", [0, 1], {1: 2})], "down": []})
    model = onnx.load(path)
    for node, stage in ((model.graph.node[0], 0), (model.graph.node[2], 1)):
        node.device_configurations[0].pipeline_stage = stage
    onnx.save(model, path)
    with pytest.warns(UserWarning, match="2 pipeline stages; every rank runs all of them"):
        check(path, CHECKED)


def test_a_configuration_that_shards_nothing_is_no_strategy(tmp_path: Path) -> None:
    plan = check(annotated(tmp_path, MLP, 2, {"up": []}), Options(devices=4, check_layouts=True))
    assert layouts(plan)["x"] == "[dp, -]"


def test_several_configurations(tmp_path: Path) -> None:
    path = annotated(tmp_path, MLP, 2, {"up": [("w", [0, 1], {1: 2})]})
    model = onnx.load(path)
    model.configuration.add(name="rows", num_devices=2)
    entry = model.graph.node[0].device_configurations.add(configuration_id="rows")
    entry.sharding_spec.append(_spec("x", [0, 1], {0: 2}))
    onnx.save(model, path)
    with pytest.raises(StrategyError, match=r"2 of the model's configurations fit 2 ranks"):
        sharder.plan(path, Options(devices=2))
    plan = check(path, Options(configuration="rows", check_layouts=True))
    assert layouts(plan)["x"] == "[d, -]" and not plan.collectives


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights in files of their own come along."""
    source = tmp_path / "source"
    source.mkdir()
    path = annotated(source, MLP, 2, {})
    onnx.save(onnx.load(path), path, save_as_external_data=True, size_threshold=0, location="w.bin")
    written = tmp_path / "annotated.onnx"
    arguments = ["--devices", "2", "--preset", "tensor-parallel", "--configuration", "none"]
    assert cli.main(["annotate", str(path), *arguments, "-o", str(written)]) == 0
    assert "written to" in capsys.readouterr().out
    plan = check(written, CHECKED)
    how = Options(devices=2, preset="tensor-parallel", configuration="none")
    assert layouts(plan) == layouts(sharder.plan(path, how)[0]) and str(plan.mesh) == "tp=2"


OPEN = MLP.replace("float[8,", "float[batch,")


def test_open_sizes_are_shown_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `plan` shows them, not at the sizes at which the model was tried."""
    path, written = annotated(tmp_path, OPEN, 1, {}), tmp_path / "written.onnx"
    how = ["--devices", "2", "--preset", "data-parallel"]
    assert cli.main(["annotate", str(path), *how, "-o", str(written)]) == 0
    shown = capsys.readouterr().out
    assert "[batch, " in shown
    assert cli.main(["plan", str(path), *how]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert [line for line in planned if "[batch, " in line] == [
        line for line in shown.splitlines() if "[batch, " in line
    ]


@pytest.mark.slow
def test_a_model_annotated_with_onnx_ir(tmp_path: Path) -> None:
    ir = pytest.importorskip("onnx_ir")
    model = ir.load(annotated(tmp_path, MLP, 1, {}))
    model.device_configurations = ()
    devices = model.add_device_configuration("pair", device_names=("CPU:0", "CPU:1"))
    up, act, down = model.graph
    for node, value, axis in (
        (up, up.inputs[1], 1),
        (act, act.inputs[0], -1),
        (down, act.outputs[0], 1),
    ):
        node.shard(value, configuration=devices, axis=axis, num_shards=2, device_indices=(0, 1))
    path = tmp_path / "annotated.onnx"
    ir.save(model, path)
    plan = check(path, CHECKED)
    assert layouts(plan) == {"x": "[-, -]", "y": "[-, -]", "w": "[-, d]", "v": "[d, -]"}
    assert kinds(plan) == [("AllReduce", "y")]


def test_annotations_of_nodes_in_bodies_are_removed() -> None:
    text = """<ir_version: 11, opset_import: ["" : 18]>
    choice (bool c, float[4] x) => (float[4] y) {
      y = If(c) <then_branch = one () => (a) { a = Relu(x) },
                 else_branch = two () => (b) { b = Neg(x) }>
    }"""
    model = onnx.parser.parse_model(text)
    node = model.graph.node[0].attribute[0].g.node[0]
    node.device_configurations.add(configuration_id="mesh")
    node.metadata_props.add(key="onnxpar.axes", value="{}")
    node.metadata_props.add(key="other", value="stays")
    clear_annotations(model)
    assert not node.device_configurations
    assert [p.key for p in node.metadata_props] == ["other"]
