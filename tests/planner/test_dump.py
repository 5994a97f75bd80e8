"""A dump is read back: the passes that are left make of it what they make of the model itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onnxpar
from onnxpar.cli.command_line import main
from onnxpar.cost.host import MEASURED
from onnxpar.cost.topology import Session, Topology
from onnxpar.graph import write_model
from onnxpar.graph.lazy_values import StackedValues
from onnxpar.graph.write_model import INLINE
from onnxpar.load.load import load
from onnxpar.planner import plugins
from onnxpar.planner.typed_json import decode, encode
from onnxpar.sharding.analysis import analyse

MODELS = Path(__file__).parents[2] / "models"
PASSES = (
    "propagate-layouts",
    "insert-collectives",
    "compress-collectives",
    "fuse-all-reduces",
    "localize-ops",
    "split-programs",
    "overlap-collectives",
    "order-collectives",
)
TEXT = """<ir_version: 8, opset_import: ["" : 11]>
m (float[N,4] x) => (float[N,4] y)
<float[4,4] w = {1,2,3,4, 5,6,7,8, 9,1,2,3, 4,5,6,7}>
{ h = MatMul(x, w)  s = Softmax<axis = 1>(h)  y = Relu(s) }"""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {})


def opt(model: Path, *rest: str) -> int:
    """Runs `onnxpar opt`."""
    return main(["opt", str(model), *rest])


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training step."""
    path = tmp_path_factory.mktemp("step") / "step.onnx"
    model = str(MODELS / "dlrm.legacy.training.onnx")
    options = ["--loss", "bce", "--optimizer", "adam", "-o", str(path)]
    assert main(["grad", model, *options]) == 0
    return path


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "name,how",
    [
        ("gpt2.legacy.static.onnx", ["--mesh", "dp=2,tp=2", "--preset", "hybrid"]),
        ("mixtral.dynamo.static.onnx", ["--devices", "4", "--search", "auto"]),
        ("llama_heads9.dynamo.static.onnx", ["--mesh", "tp=4", "--preset", "tensor-parallel"]),
        ("resnet.legacy.static.onnx", ["--mesh", "dp=4"]),
        ("step", ["--devices", "3", "--preset", "zero3"]),
        ("llama.legacy.static.onnx", ["--mesh", "dp=2,cp=2", "--preset", "context-parallel"]),
    ],
)
def test_later_passes_make_the_same_of_a_dump(
    name: str, how: list[str], tmp_path: Path, step: Path
) -> None:
    model = step if name == "step" else MODELS / name
    assert opt(model, *how, "--passes", ",".join(PASSES), "--dump", str(tmp_path / "all")) == 0
    wanted = (tmp_path / "all" / "09-order-collectives.onnxtxt").read_text()
    first = {1: "annotate-strategy", 2: PASSES[0], 3: PASSES[1], 5: PASSES[3]}
    for number, made in first.items():
        dump = tmp_path / "all" / f"{number:02d}-{made}.onnx"
        rest = PASSES[number - 1 :]
        again = tmp_path / f"from-{number}"
        assert opt(dump, "--passes", ",".join(rest), "--dump", str(again)) == 0
        found = (again / f"{len(rest):02d}-order-collectives.onnxtxt").read_text()
        assert found == wanted, made


@pytest.mark.slow
def test_ops_of_the_compiler_are_read_again(tmp_path: Path) -> None:
    model = MODELS / "bert.legacy.static.onnx"
    how = ["--mesh", "cp=2", "--preset", "ring-attention", "--dump", str(tmp_path / "d")]
    passes = ",".join(("fuse-attention", "annotate-strategy", *PASSES))
    assert opt(model, *how, "--passes", passes) == 0
    wanted = (tmp_path / "d" / "10-order-collectives.onnxtxt").read_text()
    wanted = re.sub(r"(?m)^(const .*float32 scalar \[\]) = .*", r"\1", wanted)  # read when needed
    assert "CollectivePermute" in wanted
    dump, rest = tmp_path / "d" / "02-annotate-strategy.onnx", PASSES
    assert opt(dump, "--passes", ",".join(rest), "--dump", str(tmp_path / "e")) == 0
    assert (tmp_path / "e" / "08-order-collectives.onnxtxt").read_text() == wanted


def test_weights_are_written_once(tmp_path: Path) -> None:
    model = MODELS / "gpt2_vocab50257.dynamo.static.onnx"
    how = ["--devices", "2", "--preset", "data-parallel"]
    assert opt(model, *how, "--passes", ",".join(PASSES[:2]), "--dump", str(tmp_path / "d")) == 0
    sizes = [4 * int(np.prod(t.dims)) for t in onnx.load(model).graph.initializer]
    large = sum(size for size in sizes if size > INLINE)
    assert large <= (tmp_path / "d" / "weights.data").stat().st_size < large + 4096 * len(sizes)
    onnx.load(tmp_path / "d" / "03-insert-collectives.onnx")  # finds its data


def test_the_text_of_a_dump_stands_for_the_model_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS / "dlrm.legacy.static.onnx"
    how = ["--devices", "2", "--preset", "tensor-parallel"]
    assert opt(model, *how, "--passes", ",".join(PASSES[:5]), "--dump", str(tmp_path)) == 0
    text = tmp_path / "03-insert-collectives.onnxtxt"
    assert opt(text, "--passes", "localize-ops", "--print-after", "all") == 0
    assert "AllReduce" in capsys.readouterr().out
    assert opt(tmp_path / "06-localize-ops.onnxtxt", "--passes", "order-collectives") == 2
    assert "after localize-ops" in capsys.readouterr().err
    assert opt(text, "--passes", "insert-collectives") == 2
    assert "cannot run once there are layouts" in capsys.readouterr().err
    assert opt(text, "--mesh", "tp=3", "--passes", "localize-ops") == 2
    assert "was dumped for the mesh" in capsys.readouterr().err


@pytest.mark.matrix
@pytest.mark.parametrize("key", ["ops", "mesh", "layouts"])
def test_a_damaged_dump_is_refused_by_name(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS / "dlrm.legacy.static.onnx"
    how = ["--devices", "2", "--preset", "tensor-parallel"]
    assert opt(model, *how, "--passes", ",".join(PASSES[:2]), "--dump", str(tmp_path)) == 0
    file = tmp_path / "03-insert-collectives.onnx"
    damaged = onnx.load(file, load_external_data=False)
    entry = next(e for e in damaged.metadata_props if e.key == "onnxpar.dump")
    entry.value = entry.value.replace(f'"{key}"', '"gone"', 1)
    file.write_bytes(damaged.SerializeToString())
    assert opt(file, "--passes", "localize-ops") == 2
    assert file.name in capsys.readouterr().err


def test_a_dump_of_another_version_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Format 2 had no facts."""
    how = ["--devices", "2", "--preset", "tensor-parallel"]
    model = MODELS / "dlrm.legacy.static.onnx"
    assert opt(model, *how, "--passes", ",".join(PASSES[:2]), "--dump", str(tmp_path)) == 0
    file = tmp_path / "02-propagate-layouts.onnx"
    old = onnx.load(file, load_external_data=False)
    entry = next(e for e in old.metadata_props if e.key == "onnxpar.dump")
    state = json.loads(entry.value)
    del state["facts"]
    entry.value = json.dumps({**state, "format": 2})
    file.write_bytes(old.SerializeToString())
    assert opt(file, "--passes", "insert-collectives") == 2
    told = capsys.readouterr().err
    assert "was not written by --dump of this version of onnxpar" in told


def test_a_graph_that_was_only_rewritten_is_a_plain_model(tmp_path: Path) -> None:
    plugin = tmp_path / "negate.py"
    plugin.write_text(NEGATE)
    model = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT.replace("N,", "3,")), model)
    made = tmp_path / "made.onnx"
    how = ["--plugin", str(plugin), "--passes", "negate-outputs", "-o", str(made)]
    assert opt(model, *how) == 0
    x = np.ones((3, 4), np.float32)
    (y,) = ort.InferenceSession(model).run(None, {"x": x})
    (z,) = ort.InferenceSession(made).run(None, {"x": x})
    np.testing.assert_array_equal(z, -y)


def test_passes_from_outside_rewrite_graphs_of_open_sizes(tmp_path: Path) -> None:
    from onnxpar.runtime.session.session import InferenceSession

    plugin = tmp_path / "negate.py"
    plugin.write_text(NEGATE)
    model = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT.replace(": 11", ": 18")), model)
    how = ["--plugin", str(plugin), "--add-pass", "negate-outputs", "--mesh", "dp=2"]
    assert main(["shard", str(model), *how, "-o", str(tmp_path / "model.par")]) == 0
    with InferenceSession(tmp_path / "model.par") as session:
        for rows in (2, 5):
            x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
            (y,) = ort.InferenceSession(model).run(None, {"x": x})
            np.testing.assert_allclose(session.run(None, {"x": x})[0], -y, rtol=1e-6)


NEGATE = '''
from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import Pass, PassContext, Stage


@dataclass(frozen=True)
class NegateOutputs(Pass):
    """Negate what the graph returns."""

    name: ClassVar[str] = "negate-outputs"
    stage = Stage.REWRITE

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        for output in graph.outputs:
            producer = output.inputs[0]
            inner = gs.Variable(output.name + ".positive", output.dtype, output.shape)
            producer.outputs = [inner]
            graph.nodes.append(gs.Node("Neg", f"Neg_{output.name}", {}, [inner], [output]))
        return True
'''


FUNCTION = """<ir_version: 8, opset_import: ["" : 9, "own" : 1]>
twice (float[4,6] x) => (float[4,6] y) {
  c = Constant <value = float[1] {2.0}> ()
  h = own.Double(x)
  y = Mul(h, c)
}
<domain: "own", opset_import: ["" : 9]>
Double (a) => (b) { b = Add(a, a) }"""


def test_the_rewrites_of_the_loader_are_dumped(tmp_path: Path) -> None:
    """Each that changed something, in order, by name; a second dump leaves none of the first."""
    path = tmp_path / "twice.onnx"
    onnx.save(onnx.parser.parse_model(FUNCTION), path)
    folder = tmp_path / "d" / "00-load"
    folder.mkdir(parents=True)
    (folder / "07-older.onnxtxt").write_text("")
    plan = onnxpar.plan(path, devices=2, dump=tmp_path / "d")
    assert plan.to_json() == onnxpar.plan(path, devices=2).to_json()
    texts = {file.name: file.read_text() for file in sorted(folder.iterdir())}
    assert list(texts) == [
        "00-read.onnxtxt",
        "01-inline-functions.onnxtxt",
        "02-upgrade-opset.onnxtxt",
        "03-infer-shapes.onnxtxt",
        "04-import.onnxtxt",
    ]
    read, inlined, upgraded, *_, imported = texts.values()
    assert "own.Double" in read and "own.Double" not in inlined and "Add" in inlined
    assert '"" : 9' in inlined and '"" : 18' in upgraded
    assert "Constant" in upgraded and "Constant" not in imported


@pytest.mark.slow
def test_large_weights_of_a_dump_of_the_loader_are_types(tmp_path: Path) -> None:
    onnxpar.plan(MODELS / "bert.dynamo.static.onnx", devices=2, dump=tmp_path)
    text = (tmp_path / "00-load" / "00-read.onnxtxt").read_text()
    assert "bert.embeddings.word_embeddings.weight" in text and len(text) < 20_000


@pytest.mark.slow
def test_a_dump_changes_nothing_in_the_graphs_of_ranks(tmp_path: Path) -> None:
    """Writing a model declares the domains of its nodes, among them that of reshards."""
    how: dict[str, Any] = {"devices": 2, "preset": "tensor-parallel"}
    onnxpar.shard(MODELS / "gpt2.dynamo.static.onnx", tmp_path / "a", **how)
    onnxpar.shard(MODELS / "gpt2.dynamo.static.onnx", tmp_path / "b", dump=tmp_path / "d", **how)
    first, second = (tmp_path / name / "rank_0001.onnx" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert {o.domain for o in onnx.load(second).opset_import} == {"", "onnxpar"}


@pytest.mark.slow
def test_fusion_runs_once_and_says_what_it_joined(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dumps are the graph before and after; the plan counts what both hold."""
    how = ["--devices", "2", "--preset", "data-parallel"]
    assert main(["shard", str(step), *how, "--dump", str(tmp_path), "-o", f"{tmp_path}/s.par"]) == 0
    told = capsys.readouterr().out
    run = set(onnxpar.plan(step, devices=2, preset="data-parallel").to_json()["step"]["evaluation"])
    counts = []
    for name in ("04-compress-collectives", "05-fuse-all-reduces"):
        graph = onnx.load(tmp_path / f"{name}.onnx").graph
        makers = {output: node for node in graph.node for output in node.output}
        todo, needed = [t.name for t in graph.output if t.name not in run], set()
        while todo:
            name = todo.pop()
            if name in makers and name not in needed:
                needed.add(name)
                todo += makers[name].input
        nodes = {id(n): n for name, n in makers.items() if name in needed}.values()
        counts.append(sum(node.op_type == "AllReduce" for node in nodes))
    before, after = counts
    assert before > after == 2
    assert f"fuse-all-reduces ran once and joined {before} AllReduce to {after}\n" in told
    plan = onnxpar.inspect(tmp_path / "s.par").to_json()
    assert plan["fused"] == {"AllReduce": [before, after]}
    assert len(plan["collectives"]) == after
    for where, passes in (
        (tmp_path / "05-fuse-all-reduces.onnx", "fuse-all-reduces"),
        (step, "propagate-layouts,insert-collectives,fuse-all-reduces,fuse-all-reduces"),
    ):
        assert opt(where, "--passes", passes, *(how if where == step else [])) == 2
        assert "there are fused collectives: it runs only once" in capsys.readouterr().err
    assert opt(tmp_path / "04-compress-collectives.onnx", "--passes", "fuse-all-reduces") == 0
    again = (tmp_path / "05-fuse-all-reduces.onnxtxt").read_text()
    assert capsys.readouterr().out.strip() == again.strip()


@pytest.mark.slow
def test_the_only_fusion_may_be_one_with_options_of_its_own(step: Path) -> None:
    how = {"devices": 2, "preset": "data-parallel"}
    own = ["fuse-all-reduces{bucket-bytes=3000} after compress-collectives"]
    made = onnxpar.plan(step, **how, fusion="none", passes=own)  # type: ignore[arg-type]
    whole = onnxpar.plan(step, **how)  # type: ignore[arg-type]
    assert made.fused["AllReduce"][0] == whole.fused["AllReduce"][0]
    assert made.fused["AllReduce"][1] > whole.fused["AllReduce"][1]
    with pytest.raises(onnxpar.StrategyError, match="runs only once"):
        onnxpar.plan(step, **how, passes=own)  # type: ignore[arg-type]
    assert not onnxpar.plan(step, **how, fusion="none").fused  # type: ignore[arg-type]


@pytest.mark.slow
def test_stacked_weights_of_a_dump_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read when they are written, not with each dumped graph."""
    loads = []
    load = StackedValues.load

    def counted(self: StackedValues) -> np.ndarray:
        loads.append(self.tensor.name)
        return load(self)

    monkeypatch.setattr(StackedValues, "load", counted)
    monkeypatch.setattr(write_model, "INLINE", 1024)
    model = MODELS / "experts" / "mixtral.loop.legacy.onnx"
    where = ["--devices", "2", "--preset", "expert-parallel"]
    dumped = tmp_path / "dump"
    assert main(["plan", str(model), *where, "--dump", str(dumped)]) == 0
    assert len(loads) == len(set(loads)) == 3
    after = onnx.load(dumped / "03-insert-collectives.onnx", load_external_data=False)
    stacks = [t for t in after.graph.initializer if "/experts/weight" in t.name]
    assert len(stacks) == 3 and all(t.external_data and not t.raw_data for t in stacks)
    whole = onnx.load(dumped / "03-insert-collectives.onnx")
    parts = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(model).graph.initializer}
    found = {t.name: onnx.numpy_helper.to_array(t) for t in whole.graph.initializer}
    first = found[next(name for name in found if name.endswith("/experts/weight.0.1"))]
    np.testing.assert_array_equal(first[1], parts["onnx::MatMul_718"])


def test_opt_writes_stacked_weights_apart(tmp_path: Path) -> None:
    model = MODELS / "experts" / "mixtral.loop.legacy.onnx"
    where = ["--devices", "2", "--preset", "expert-parallel"]
    made = tmp_path / "made.onnx"
    assert opt(model, *where, "--passes", "annotate-strategy", "-o", str(made)) == 0
    parts = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(model).graph.initializer}
    found = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(made).graph.initializer}
    first = found[next(name for name in found if name.endswith("/experts/weight.0.1"))]
    np.testing.assert_array_equal(first[3], parts["onnx::MatMul_726"])


@pytest.mark.slow
def test_a_dump_has_what_was_measured_of_a_device(tmp_path: Path) -> None:
    device = {"flops": "1 GFLOP/s", "ops": {"MatMul": {"row": "1 us", "element": "2 ns"}}}
    topology = tmp_path / "t.yaml"
    levels = [{"name": "host", "latency": "1 us", "bandwidth": "1 GB/s"}]
    topology.write_text(json.dumps({"levels": levels, "device": device}))
    model, dump = str(MODELS / "gpt2.legacy.static.onnx"), tmp_path / "dump"
    how = ["--devices", "2", "--topology", str(topology)]
    assert main(["plan", model, *how, "--dump", str(dump)]) == 0
    first = dump / "01-annotate-strategy.onnx"
    assert opt(first, "--passes", PASSES[0], "-o", str(tmp_path / "again.onnx")) == 0
    assert '"Rate": {"row": 1e-06, "element": 2e-09}' in text_of(first)


def text_of(dump: Path) -> str:
    model = onnx.load(dump, load_external_data=False)
    return " ".join(entry.value for entry in model.metadata_props)


def test_topologies_of_measured_hosts_are_read_again() -> None:
    """And whatever else a decision may consist of: JSON knows the fields' types by themselves."""
    topology = replace(Topology.default(), origin=MEASURED, session=Session(1e-5, 2e9, 3e-6))
    graph = analyse(load(MODELS / "dlrm.legacy.static.onnx").graph)
    assert decode(json.loads(json.dumps(encode(topology))), graph) == topology
