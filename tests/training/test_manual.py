"""Training of programs per rank: as that of the global model of the same function."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import run_unsplit as run_unsplit_model
from onnx import helper, numpy_helper
from training.steps import Array, ThreadTrainer, run_unsplit

from onnxpar import cli
from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.graph.training_spec import FROZEN, Step
from onnxpar.layout.layout import Factor, Layout
from onnxpar.layout.mesh import Axis, Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy.strategy import Strategy
from onnxpar.training import grad

STEPS, RATE = 20, 0.05
TOLERANCE = {"double": 1e-9, "float": 1e-5}
HALF = 2e-2
"""Of computing in float16."""
HEAD = '<ir_version: 8, opset_import: ["" : 17, "onnxpar" : 1]>\n'
WEIGHTS = ("w1", "b1", "w2", "b2")

GLOBAL = """mlp (T[16,6] x, T[6,16] w1, T[16] b1, T[16,5] w2, T[5] b2) => (T[16,5] y)
{ h = MatMul(x, w1)  a = Add(h, b1)  t = Tanh(a)  o = MatMul(t, w2)  y = Add(o, b2) }"""

SLICES = """slices (T[16,6] x, T[6,16] w1, T[16] b1, T[16,5] w2, T[5] b2) => (T[16,5] y) {
  rank = onnxpar.Rank ()
  ranks = onnxpar.GroupSize ()
  sizes = Shape (w1)
  one = Constant <value_ints = [1]> ()
  none = Constant <value_ints = [0]> ()
  hidden = Gather (sizes, one)
  shard = Div (hidden, ranks)
  begin = Mul (rank, shard)
  end = Add (begin, shard)
  columns = Slice (w1, begin, end, one)
  own = Slice (b1, begin, end, none)
  rows = Slice (w2, begin, end, none)
  h = MatMul (x, columns)  a = Add (h, own)  t = Tanh (a)
  part = MatMul (t, rows)
  o = onnxpar.AllReduce (part)
  y = Add (o, b2)
}"""

COPIES = GLOBAL.replace("T[16,6] x", "T[2,6] x").replace("T[16,5] y", "T[2,5] y")

DEALT = """dealt (T[B,6] x, T[6,16] w1, T[16] b1, T[16,5] w2, T[5] b2) => (T[B,5] y) {
  h = MatMul (x, w1)  a = Add (h, b1)  t = Tanh (a)
  part = MatMul (t, w2)
  o = onnxpar.AllReduce <axes = ["tp"]> (part)
  y = Add (o, b2)
}"""
COLUMNS = {"w1": [None, "tp"], "b1": ["tp"], "w2": ["tp", None]}


@dataclass(frozen=True)
class Case:
    """A program per rank that computes what GLOBAL does."""

    text: str
    mesh: str
    tensors: Mapping[str, Any] = field(default_factory=dict)


BATCH = {name: ["dp", None] for name in ("x", "target")}
CASES = {
    "slices": Case(SLICES, "ranks=8"),
    "copies": Case(COPIES, "dp=8", BATCH),
    "dealt": Case(DEALT.replace("B", "16"), "tp=8", COLUMNS),
    "both": Case(DEALT.replace("B", "8"), "dp=2,tp=4", {**BATCH, **COLUMNS}),
}


def write(folder: Path, name: str, text: str, dtype: str) -> Path:
    """Saves a model; all inputs but x become weights, with values that their names decide."""
    model = onnx.parser.parse_model(HEAD + text.replace("T[", f"{dtype}[".replace("half", "float")))
    for port in [port for port in model.graph.input if port.name != "x"]:
        shape = [d.dim_value for d in port.type.tensor_type.shape.dim]
        value = np.random.default_rng([*port.name.encode()]).standard_normal(shape) / 2
        array = np.abs(value) if port.name == "v" else value
        array = array.astype(np.float64 if dtype == "double" else np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, port.name))
        model.graph.input.remove(port)
    onnx.save(model, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


def batches(dtype: str, rows: int = 16) -> list[dict[str, Array]]:
    draw = np.random.default_rng(3)
    element = np.float64 if dtype == "double" else np.float32
    widths = {"x": 6, "target": 5}
    return [
        {
            name: draw.standard_normal((rows, width)).astype(element)
            for name, width in widths.items()
        }
        for _ in range(STEPS)
    ]


def labelled(batch: Mapping[str, Array]) -> dict[str, Array]:
    """The same, with classes for targets."""
    return {"x": batch["x"], "labels": batch["target"].argmax(axis=1)}


def shard(folder: Path, case: Case, dtype: str = "double", **how: Any) -> Path:
    """Writes and shards the step of a program per rank."""
    step = folder / "manual.step.onnx"
    given = {"loss": "mse", "optimizer": "sgd", "strategy": {"tensors": case.tensors}, **how}
    grad(write(folder, "manual", case.text, dtype), step, preset="manual", mesh=case.mesh, **given)
    sharder.shard(step, folder / "step.par", Options(preset="manual", check_layouts=True))
    return folder / "step.par"


def check(
    folder: Path,
    case: Case,
    dtype: str = "double",
    feeds: Sequence[Mapping[str, Array]] = (),
    whole: str = GLOBAL,
    options: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    **how: Any,
) -> Step:
    """An AssertionError where ranks do not train as the global model does; `options` are of the
    latter's gradients alone, `own` of the former's."""
    given = {"loss": "mse", "optimizer": "sgd", **how, **(options or {})}
    step = folder / "global.step.onnx"
    grad(write(folder, "global", whole, dtype), step, **given)
    feeds = feeds or batches(dtype)
    told, spec = run_unsplit(step, [dict(f) for f in feeds], [RATE] * len(feeds))
    with ThreadTrainer(shard(folder, case, dtype, **{**how, **(own or {})})) as trainer:
        for name, value in trainer.evaluate(feeds[0]).items() if trainer.spec.evaluation else ():
            agree(f"evaluation.{name}", value, told[0][f"evaluation.{name}"], dtype)
        for batch, wanted in zip(feeds, told, strict=True):
            found = trainer.step(batch, RATE)
            for name in (spec.loss, *spec.metrics):
                agree(name, found[name], wanted[name], dtype)
        for slot in spec.slots:
            state = trainer.session.states.read(slot.input)
            agree(slot.input, state, told[-1][slot.output], dtype)
    return trainer.spec


def agree(name: str, found: Any, wanted: Array, dtype: str) -> None:
    atol = TOLERANCE.get(dtype, HALF) * (float(np.abs(wanted).max()) or 1.0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=name)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps(case: str, dtype: str, tmp_path: Path) -> None:
    """With gradients that are clipped by the norm of all, each part of which counts once."""
    check(tmp_path, CASES[case], dtype, optimizer="momentum", clip_norm=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("group", ['"all"', "[7, 6, 5, 4, 3, 2, 1, 0]"])
def test_a_step_remembers_its_groups(group: str, tmp_path: Path) -> None:
    """`shard` gets no strategy; the step knows the ranks of the name."""
    text = DEALT.replace("B", "16").replace('axes = ["tp"]', f"group = {group}")
    strategy = {"tensors": COLUMNS, "groups": {"all": list(range(8))}}
    check(tmp_path, Case(text, "tp=8", COLUMNS), own={"strategy": strategy})
    other = Strategy.of({"groups": {"all": [0, 1]}})
    with pytest.raises(StrategyError, match="its groups are not those of the training step"):
        sharder.plan(tmp_path / "manual.step.onnx", Options(preset="manual", strategy=other))


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "adagrad", "nadam", "lars"])
def test_optimizers(optimizer: str, tmp_path: Path) -> None:
    """LAMB's steps are as long as the norms of whole parameters say."""
    spec = check(tmp_path, CASES["both"], optimizer=optimizer, weight_decay=0.1)
    bundle = Bundle.load(tmp_path / "step.par")
    for slot in spec.slots:
        if slot.of and slot.kind != "mu_complement":  # a number
            layout = bundle.inputs[slot.of].layout
            assert bundle.inputs[slot.input].layout == bundle.outputs[slot.output].layout == layout
    assert bundle.inputs["w2"].layout == Layout((Factor(16, (Axis("tp", 4),)), Factor(5)))


def test_numbers_among_the_states_of_a_part(tmp_path: Path) -> None:
    check(tmp_path, CASES["dealt"], optimizer="nadam")


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_a_part_of_a_matrix_is_refused(optimizer: str, tmp_path: Path) -> None:
    """A rank has no rows or columns of the others; another optimizer may update the parts."""
    message = f"each rank .* a part of 'b?w?[12]', but {optimizer} needs .* --group '.*:optimizer="
    with pytest.raises(StrategyError, match=message):
        check(tmp_path, CASES["dealt"], optimizer=optimizer)
    parts = ["w*:optimizer=adamw", "b1:optimizer=adamw"]
    check(tmp_path, CASES["dealt"], optimizer=optimizer, group=parts)


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str, tmp_path: Path) -> None:
    step = tmp_path / "global.step.onnx"
    grad(write(tmp_path, "global", GLOBAL, "double"), step, loss="mse", optimizer="none")
    (told,), _ = run_unsplit(step, batches("double")[:1], [0.0])
    with ThreadSession(shard(tmp_path, CASES[case], optimizer="none"), timeout=20) as session:
        names = [f"{name}.grad" for name in WEIGHTS]
        for name, value in zip(names, session.run(names, batches("double")[0]), strict=True):
            agree(name, value, told[name], "double")


def test_classes(tmp_path: Path) -> None:
    tensors = {"x": ["dp", None], "labels": ["dp"]}
    feeds = [labelled(batch) for batch in batches("double")]
    loss = "softmax-cross-entropy"
    spec = check(tmp_path, Case(COPIES, "dp=8", tensors), feeds=feeds, loss=loss)
    assert spec.evaluation[:2] == ["evaluation.loss", "evaluation.accuracy"]


@pytest.mark.slow
def test_what_is_not_trained(tmp_path: Path) -> None:
    """A part of a weight that stays, behind which others are trained."""
    spec = check(tmp_path, CASES["both"], frozen=["w2", "b1"])
    trained = [slot.input for slot in spec.slots if slot.kind != FROZEN]
    assert trained == ["w1", "b2"] and sorted(spec.data) == ["target", "x"]


@pytest.mark.slow
def test_batches_in_parts(tmp_path: Path) -> None:
    """Each rank has the gradients of its samples a part at a time, and sums once."""
    check(tmp_path, CASES["copies"], feeds=batches("double", 48), accumulate=3)
    nodes = onnx.load(tmp_path / "manual.step.onnx").graph.node
    assert sum(n.op_type == "AllReduce" for n in nodes) == len(WEIGHTS) + 2


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("case", ["slices", "both"])
@pytest.mark.parametrize("how", [{"recompute": True}, {"precision": "float16"}])
def test_memory(case: str, how: Mapping[str, Any], tmp_path: Path) -> None:
    """In half precision all ranks take the same steps, as some gradients overflow."""
    spec = check(tmp_path, CASES[case], "half" if "precision" in how else "float", **how)
    assert ("skipped" in spec.metrics) == ("precision" in how)


def test_collectives_do_not_run_in_parts(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"AllReduce '.*' would run in the loop over micro-"):
        shard(tmp_path, CASES["slices"], accumulate=2)


@pytest.mark.slow
def test_statistics(tmp_path: Path) -> None:
    """Each rank normalizes by its own samples, and all keep the mean of the running ones."""
    normal = (
        "n = BatchNormalization <epsilon = 0.0078125, momentum = 0.5> (a, s, c, m, v)  t = Tanh(n)"
    )
    head = "T[16] s, T[16] c, T[16] m, T[16] v)"
    whole, own = (
        text.replace("t = Tanh(a)", normal).replace("T[5] b2)", f"T[5] b2, {head}")
        for text in (GLOBAL, COPIES)
    )
    case = Case(own, "dp=8", BATCH)
    spec = check(tmp_path, case, whole=whole, options={"groups": 8}, batch_norm="local", groups=1)
    assert [s.input for s in spec.slots if s.kind == "statistic"] == ["m", "v"]
    with pytest.raises(StrategyError, match="--batch-norm global: the program of a rank"):
        shard(tmp_path, case, batch_norm="global")


def test_stages_that_send(tmp_path: Path) -> None:
    """What a rank computes is used by another, as in a pipeline."""
    text = """stages (T[16,6] x, T[6,16] w1, T[16] b1, T[16,5] w2, T[5] b2) => (T[16,5] y) {
      h = MatMul (x, w1)  a = Add (h, b1)  t = Tanh (a)
      sent = onnxpar.Send <peer = [1, -1]> (t)
      z = onnxpar.Recv <peer = [-1, 0]> (t)
      o = MatMul (z, w2)  y = Add (o, b2)
    }"""
    assert not check_sent(tmp_path, text).evaluation


def check_sent(folder: Path, text: str) -> Step:
    model = onnx.parser.parse_model(HEAD + text.replace("T[", "double["))
    assert [n.op_type for n in model.graph.node][3:5] == ["Send", "Recv"]
    return check(folder, Case(text, "stage=2"))


@pytest.mark.slow
def test_what_only_training_does(tmp_path: Path) -> None:
    """The evaluation has the same collectives, under tags of their own; ranks draw the same."""
    drop = """t = Tanh (a)
      ratio = Constant <value_float = 1e-30> ()  training = Constant <value = bool {1}> ()
      d, mask = Dropout (t, ratio, training)"""
    whole, own = (
        text.replace("Tanh(a)", "Tanh (a)")
        .replace("t = Tanh (a)", drop)
        .replace("(t, w2)", "(d, w2)")
        for text in (GLOBAL, CASES["dealt"].text.replace("AllReduce <", "AllReduce <tag = 4, "))
    )
    feeds = [{**batch, "seed": np.array(0)} for batch in batches("double")]
    spec = check(tmp_path, Case(own, "tp=8", COLUMNS), feeds=feeds, whole=whole)
    assert spec.seed == "seed"


def test_sizes_that_differ_between_ranks(tmp_path: Path) -> None:
    text = SLICES.replace(
        "end = Add (begin, shard)", "more = Add (begin, shard)  end = Sub (more, rank)"
    )
    with pytest.raises(ModelError, match=r"the shape of 'rows'.*shards of equal size"):
        shard(tmp_path, Case(text, "ranks=2"))


def test_a_strategy_may_repeat_what_the_step_says(tmp_path: Path) -> None:
    """But not contradict it: gradients are summed as it says."""
    shard(
        tmp_path,
        CASES["dealt"],
        optimizer="adam",
        strategy={"tensors": {**COLUMNS, "y": [None] * 2}},
    )
    step = tmp_path / "manual.step.onnx"

    def plan(tensors: Mapping[str, Any], **how: Any) -> Plan:
        given = {"preset": "manual", "strategy": Strategy.of({"tensors": tensors}), **how}
        return sharder.plan(step, Options(**given))[0]

    made = plan({**COLUMNS, "y": [None, None], "w1.exp_avg": [None, "tp"]}, devices=8)
    assert made.mesh == Mesh.parse("tp=8")
    for tensors, how, message in (
        (
            {"w1": [None, None]},
            {},
            r"shards tensor 'w1' as \[None, None\].* made for \[None, 'tp'\]",
        ),
        ({"b2": ["tp"]}, {}, "shards tensor 'b2'"),
        ({"w2.exp_avg": [None, "tp"]}, {}, "shards tensor 'w2.exp_avg'"),
        ({"q": [None]}, {}, "'q' matches no input, weight or output"),
        ({}, {"mesh": Mesh.parse("tp=4")}, "written for the mesh tp=8; give that mesh"),
        ({}, {"devices": 4}, "written for the mesh tp=8; give that mesh"),
        ({}, {"preset": None}, "give --preset manual"),
    ):
        with pytest.raises(StrategyError, match=message):
            plan(tensors, **how)


def test_a_strategy_must_match(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="'q' matches no input, weight or output"):
        shard(tmp_path, CASES["copies"], strategy={"tensors": {"q": ["dp"]}})
    model = write(tmp_path, "global", GLOBAL, "double")
    with pytest.raises(StrategyError, match="a mesh and a strategy are for a program per rank"):
        grad(model, tmp_path / "step.onnx", loss="mse", optimizer="sgd", mesh="dp=2")


def test_weights_that_may_be_fed_are_dealt_whole(tmp_path: Path) -> None:
    """Of an initializer that is an input, the shape is that of what is stored."""
    path = write(tmp_path, "manual", CASES["dealt"].text, "double")
    model = onnx.load(path)
    for weight in model.graph.initializer:
        port = helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        model.graph.input.append(port)
    onnx.save(model, path)
    how = Options(
        mesh=Mesh.parse("tp=8"), preset="manual", strategy=Strategy.of({"tensors": COLUMNS})
    )
    sharder.shard(path, tmp_path / "model.par", how)
    x = batches("double")[0]["x"]
    (wanted,) = run_unsplit_model(write(tmp_path, "global", GLOBAL, "double"), {"x": x})
    with ThreadSession(tmp_path / "model.par", timeout=20) as session:
        agree("y", session.run(["y"], {"x": x})[0], wanted, "double")


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On processes; `check --train` holds the ranks' copies against each other."""
    model = write(tmp_path, "model", DEALT.replace("B", "8"), "float")
    deal, step, par = (tmp_path / name for name in ("deal.yaml", "step.onnx", "step.par"))
    deal.write_text(json.dumps({"mesh": {"dp": 2, "tp": 2}, "tensors": {**BATCH, **COLUMNS}}))
    manual = ["--preset", "manual", "--strategy", str(deal)]
    how = ["--loss", "mse", "--optimizer", "adam", "-o", str(step)]
    assert cli.main(["grad", str(model), *manual, *how]) == 0
    assert cli.main(["shard", str(step), *manual, "-o", str(par)]) == 0
    np.savez(tmp_path / "data.npz", **batches("float", 32)[0])
    data = [
        "--data",
        str(tmp_path / "data.npz"),
        "--lr",
        "0.01",
        "--log-dir",
        str(tmp_path / "log"),
    ]
    assert cli.main(["train", str(par), *data, "--epochs", "2"]) == 0
    assert "epoch: 2 step: 2, loss is" in capsys.readouterr().out
    assert cli.main(["check", str(step), *manual, "--train", "--steps", "3"]) == 0
    assert "all outputs agree" in capsys.readouterr().out
    forget_a_sum(step)
    assert cli.main(["check", str(step), *manual, "--train", "--steps", "3"]) == 1
    assert "the outputs differ; the worst is w1.next" in capsys.readouterr().out


def forget_a_sum(step: Path) -> None:
    """Leaves each rank with its own gradient of w1."""
    model = onnx.load(step)
    sums = {n.output[0]: n for n in model.graph.node if n.op_type == "AllReduce"}
    shapes = {tuple(v.dims): v.name for v in model.graph.initializer}
    assert shapes
    for node in model.graph.node:
        if node.name.startswith("update/w1/") and node.op_type == "Mul":
            for name in node.input:
                if name in sums:
                    sums[name].op_type, sums[name].domain = "Identity", ""
                    del sums[name].attribute[:]
    onnx.save(model, step)
