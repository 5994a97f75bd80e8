"""The calls of Python: the same options as the command line, and the same results."""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxpar
import onnxpar.training
from onnxpar.base.errors import InputError, ModelError, StrategyError
from onnxpar.cli.command_line import main
from onnxpar.cli.parser import parser
from onnxpar.llm.sampling import Sampling
from onnxpar.planner.convert_options import options_of
from onnxpar.planner.option_entry import table
from onnxpar.planner.option_table import Kind
from onnxpar.serve.settings import Settings
from onnxpar.trainer.grad_options import HYPERPARAMETERS
from onnxpar.training.optimizers import OPTIMIZERS

MODELS = Path(__file__).parents[1] / "models"
DLRM = MODELS / "dlrm.dynamo.static.onnx"
TP = {"devices": 2, "preset": "tensor-parallel"}
TP_ARGS = ["--devices", "2", "--preset", "tensor-parallel"]
RANDOM = np.random.default_rng(0)

# Of the command line alone: how results are printed and where they go.
PRINTED = {"quiet", "verbose", "help", "json", "command"}
# Set environment variables, which programs set themselves.
VARIABLES = {"interface", "tls_dir", "insecure"}
CALLS: dict[str, tuple[list[Callable[..., Any]], set[str]]] = {
    "shard": ([onnxpar.shard], set()),
    # plan's flags for other results are calls of their own
    "plan": (
        [onnxpar.plan, onnxpar.candidates, onnxpar.compare_trace, onnxpar.node_costs],
        {"compare", "candidates", "costs"},
    ),
    "annotate": ([onnxpar.annotate], set()),
    "run": (
        [onnxpar.InferenceSession],
        {"par", "inputs", "random", "seed", "outputs", "repeat", "warmup"},
    ),
    "generate": (
        [onnxpar.InferenceSession, Sampling],
        {
            *("par", "prompt", "file", "chat", "system", "max_new_tokens", "stop", "sample"),
            *("audio", "language", "task"),
        },
    ),
    "serve": (
        [onnxpar.InferenceSession, Settings],
        {
            *("par", "host", "port", "api_key", "api_key_file", "drain_timeout"),
            *("kv_memory", "max_running", "max_waiting", "step_tokens", "config"),
        },
    ),
    # starts commands, which Python programs are
    "launch": ([], {"grace", "hosts", "hostfile", "max_restarts", "min_ranks", "python", "words"}),
    "check": ([onnxpar.check], set()),
    "verify": ([onnxpar.verify], set()),
    "inspect": ([onnxpar.inspect], {"sha256sums"}),
    "grad": ([onnxpar.training.grad], set()),
    "train": ([onnxpar.training.train], {"csv", "tensorboard"}),  # records are returned
    "checkpoint merge": ([onnxpar.training.merge], set()),
    "checkpoint weights": ([onnxpar.training.export_weights], set()),
    "opt": ([onnxpar.opt], set()),
    "calibrate": ([onnxpar.calibrate], set()),
    "ops": ([onnxpar.ops], set()),
}


def commands(of: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every command by name, with the names of its arguments."""
    inner = [a for a in of._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
        yield name, {action.dest for action in of._actions} - PRINTED - VARIABLES
    for action in inner:
        for word, each in action.choices.items():
            yield from commands(each, f"{name} {word}".strip())


def test_every_command_is_a_call() -> None:
    assert {name for name, _ in commands(parser())} == CALLS.keys()


@pytest.mark.parametrize("name,arguments", list(commands(parser())))
def test_calls_have_the_options_of_commands(name: str, arguments: set[str]) -> None:
    calls, others = CALLS[name]
    have: set[str] = set()
    for call in calls:
        have |= inspect.signature(call).parameters.keys()
    assert arguments - others <= have


KINDS: dict[str, Kind] = {
    "shard": onnxpar.PlanOptions,
    "plan": onnxpar.PlanOptions,
    "check": onnxpar.PlanOptions,
    "annotate": onnxpar.LayoutOptions,
    "opt": onnxpar.LayoutOptions,
}


@pytest.mark.parametrize("name", KINDS)
def test_commands_have_the_options_of_plans(name: str) -> None:
    always = {"check_layouts"}  # commands always check them
    assert set(table(KINDS[name])) - always <= dict(commands(parser()))[name]


@pytest.mark.parametrize("name", ["annotate", "opt"])
def test_what_lowers_nothing_has_no_options_of_it(name: str) -> None:
    own = {"passes"} & {"opt": {"passes"}}.get(name, set())
    lowering = {*table(onnxpar.PlanOptions)} - {*table(onnxpar.LayoutOptions)} - own
    assert {"fusion", "bucket_mb", "compression"} <= lowering
    assert not lowering & dict(commands(parser()))[name]
    with pytest.raises(TypeError, match=rf"{name}\(\) has no option 'fusion'"):
        getattr(onnxpar, name)(DLRM, "made", devices=2, fusion="none")


def test_signatures_list_the_options() -> None:
    for name, kind in KINDS.items():
        call = getattr(onnxpar, name)
        assert set(table(kind)) < inspect.signature(call).parameters.keys()
    assert inspect.signature(onnxpar.shard).parameters["untied"].default is False


def test_signatures_of_training_list_the_options() -> None:
    calls = onnxpar.training.grad, onnxpar.training.train
    grad, train = map(inspect.signature, calls)
    hyperparameters = {field.name for kind in OPTIMIZERS.values() for field in fields(kind)}
    assert hyperparameters == HYPERPARAMETERS.keys() < grad.parameters.keys()
    assert grad.parameters["loss"].default is grad.parameters["optimizer"].default is grad.empty
    defaults = {"sample_rate": 1.0, "accumulate": 1, "lazy": (), "recompute": False, "mesh": None}
    assert {name: grad.parameters[name].default for name in defaults} == defaults
    assert train.parameters["lr"].default is train.empty
    defaults = {"schedule": "constant", "shuffle": True, "bind": "cores", "timeout": 60.0}
    assert {name: train.parameters[name].default for name in defaults} == defaults


WRONG: dict[str, tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = {
    "no loss": (onnxpar.training.grad, {"optimizer": "sgd"}, TypeError, "needs the option 'loss'"),
    "no rate": (onnxpar.training.train, {}, TypeError, "needs the option 'lr'"),
    "misspelled": (onnxpar.training.train, {"lr": 1, "epoch": 2}, TypeError, "mean 'epochs'"),
    "text for a number": (
        onnxpar.training.grad,
        {"loss": "mse", "optimizer": "sgd", "accumulate": "2"},
        StrategyError,
        "accumulate='2' is of type str; give int",
    ),
    "text for a list": (
        onnxpar.training.grad,
        {"loss": "mse", "optimizer": "sgd", "frozen": "w"},
        StrategyError,
        "frozen='w'.*give Sequence",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_of_training(name: str) -> None:
    call, options, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        call("m.onnx", "made", **options)


def test_all_is_there_and_documented() -> None:
    for module in (onnxpar, onnxpar.training):
        assert module.__all__ == sorted(module.__all__)
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), name


def test_public_names_are_imported_when_they_are_used() -> None:
    """A program that runs a sharded model does not wait for the compiler."""
    assert sorted(onnxpar._HOMES) == onnxpar.__all__
    script = """
import sys
import onnxpar
assert "numpy" not in sys.modules
onnxpar.InferenceSession
assert not {"scipy", "onnxpar.api", "onnx_graphsurgeon"} & {*sys.modules}
onnxpar.training.train  # a room
try:
    onnxpar.nothing
except AttributeError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.stdout == "module 'onnxpar' has no attribute 'nothing'\n", told.stderr


def test_run_does_not_import_the_compiler() -> None:
    script = """
import sys
from onnxpar.cli import main
assert main(["run", "nothing.par", "--inputs", "nothing.npz"]) == 2
assert not {"scipy", "onnxpar.api", "onnx_graphsurgeon"} & {*sys.modules}
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.returncode == 0 and "nothing.par" in told.stderr, told.stderr


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError, version

    import onnxpar.base.version

    assert onnxpar.__version__ == version("onnxpar")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    told = capsys.readouterr().out
    for name in ("onnxpar", "onnxruntime", "onnx"):
        assert f"{name} {version(name)}" in told

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(onnxpar.base.version, "version", missing)
    assert onnxpar.base.version.version_of("onnxpar") == "0+unknown"


def test_shard_writes_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["shard", str(DLRM), *TP_ARGS]) == 0
    par = tmp_path / "dlrm.dynamo.static.par"
    assert "written to dlrm.dynamo.static.par" in capsys.readouterr().out
    written = par.stat().st_mtime_ns
    plan = onnxpar.shard(DLRM, **TP)  # the same again, as the command would
    assert [p.name for p in tmp_path.iterdir()] == [par.name] and par.stat().st_mtime_ns > written
    assert json.loads((par / "plan.json").read_text()).items() >= json.loads(plan.text()).items()
    par.rename(tmp_path / "kept")
    par.write_text("a file of the user's")
    assert main(["shard", str(DLRM), *TP_ARGS]) == 2
    assert "exists" in capsys.readouterr().err and par.is_file()


def test_plans_print_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(DLRM), *TP_ARGS, "--fusion", "size", "--bucket-mb", "1"]) == 0
    told = capsys.readouterr().out
    plan = onnxpar.plan(DLRM, **TP, fusion="size", bucket_mb=1)
    assert f"{plan}\n" == told
    assert (
        repr(plan) == "<Plan of dlrm.dynamo.static.onnx over 2 ranks (mesh tp=2, tensor-parallel)>"
    )


@pytest.mark.slow
def test_candidates_print_as_the_command_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    command = ["plan", str(DLRM), "--devices", "2", "--candidates"]
    assert main([*command, "--html", str(pages[0])]) == 0
    found = onnxpar.candidates(DLRM, devices=2, html=pages[1])
    assert capsys.readouterr().out == f"{found}\nwritten to {pages[0]}\n"
    assert pages[0].read_text() == pages[1].read_text()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found.to_json()
    assert 'id="candidates"' in (found._repr_html_() or "")


def test_save_strategy(tmp_path: Path) -> None:
    saved = tmp_path / "s.yaml"
    made = onnxpar.plan(DLRM, **TP, save_strategy=saved)
    again = onnxpar.plan(DLRM, strategy=saved)
    assert [c.tensor for c in again.collectives] == [c.tensor for c in made.collectives]
    with pytest.raises(InputError, match="there is no folder"):
        onnxpar.shard(DLRM, tmp_path / "m.par", **TP, save_strategy=tmp_path / "no" / "s.yaml")
    assert not (tmp_path / "m.par").exists()


def test_opt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes = "propagate-layouts,insert-collectives"
    for after in ([], ["propagate-layouts"]):
        flags = [word for name in after for word in ("--print-after", name)]
        assert main(["opt", str(DLRM), *TP_ARGS, "--passes", passes, *flags]) == 0
        assert onnxpar.opt(DLRM, passes, print_after=after, **TP) == capsys.readouterr().out
    onnxpar.opt(DLRM, "propagate-layouts", dump=tmp_path / "dump", **TP)
    assert len(list((tmp_path / "dump").glob("*.onnxtxt"))) == 2
    onnxpar.plan(DLRM, dump=tmp_path / "all", **TP)
    (dumped,) = (tmp_path / "all").glob("*propagate-layouts.onnx")
    assert "AllReduce" in onnxpar.opt(dumped, "insert-collectives")


def test_ops_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {"ReduceSum", "ReduceMax"} <= {row.op for row in onnxpar.ops("Reduce*")}
    with pytest.raises(StrategyError, match="matches no op"):
        onnxpar.ops("nope")
    onnxpar.shard(DLRM, tmp_path / "m.par", **TP)
    assert main(["inspect", str(tmp_path / "m.par")]) == 0
    plan = onnxpar.inspect(tmp_path / "m.par")
    assert f"{plan}\n" == capsys.readouterr().out
    assert "2 ranks" in repr(plan) and plan.to_json()["ranks"] == 2


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    found = onnxpar.check(DLRM, **TP)
    assert found.ok and found.plan.mesh.size == 2
    assert [row.name for row in found.report.rows] == ["probability"]
    assert main(["check", str(DLRM), *TP_ARGS]) == 0
    told = [capsys.readouterr().out, f"{found}\n", f"{found.text()}\n"]
    untimed = [[line for line in text.split("\n") if " ms " not in line] for text in told]
    assert untimed[0] == untimed[1] == untimed[2] and "all outputs agree" in told[0]


def test_check_of_given_inputs_finds_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxpar.lowering.lower_reshard import ReshardBuilder

    shapes = {p.name: p.shape for p in onnxpar.plan(DLRM, **TP).inputs}
    feeds: dict[str, Any] = {n: np.ones(s or (), np.int64) for n, s in shapes.items()}
    feeds["dense"] = np.full(shapes["dense"] or (), 2, np.float32)
    assert onnxpar.check(DLRM, feeds, **TP).ok
    with pytest.raises(InputError, match="no input is named 'nope'"):
        onnxpar.check(DLRM, {**feeds, "nope": 1}, **TP)
    broken = staticmethod(lambda self, x, y: self._add("Identity", [x], y))
    monkeypatch.setattr(ReshardBuilder, "_AllReduce", broken.__func__)
    assert not onnxpar.check(DLRM, feeds, **TP).ok


def two_products(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Writes x (4,6) times v (6,5) times w (5,3); returns the weights."""
    shapes = {"v": (6, 5), "w": (5, 3)}
    weights = {n: RANDOM.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    edges = ((["x", "v"], ["h"]), (["h", "w"], ["y"]))
    products = [helper.make_node("MatMul", *edge) for edge in edges]
    ports = (("x", [4, 6]), ("y", [4, 3]))
    source, result = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in ports)
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(products, "g", [source], [result], initializers)
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return weights


def test_train_and_merge(tmp_path: Path) -> None:
    model, step, par = (tmp_path / name for name in ("m.onnx", "step.onnx", "step.par"))
    weights = two_products(model)
    spec = onnxpar.training.grad(onnx.load(model), step, loss="mse", optimizer="sgd")
    dp: dict[str, Any] = {"devices": 2, "preset": "data-parallel"}
    fused = onnxpar.shard(step, par, **dp)
    alone = onnxpar.plan(step, **dp, fusion="none")
    small = onnxpar.plan(step, **dp, bucket_mb=1e-5)
    assert len(fused.collectives) < len(alone.collectives) == len(small.collectives)
    x = RANDOM.standard_normal((16, 6)).astype(np.float32)
    wanted = RANDOM.standard_normal((16, 3)).astype(np.float32)
    (label,) = (name for name in spec.data if name != "x")
    data = {"x": x, label: wanted}
    how: dict[str, Any] = {"lr": 0.1, "epochs": 2, "shuffle": False, "eval": data}
    records = onnxpar.training.train(par, data, **how, checkpoint=tmp_path / "run")
    assert [(r.epoch, r.step) for r in records][-1] == (2, 4) and records[-1].evaluation
    v, w = (value.astype(np.float64) for value in weights.values())
    for _ in range(2):
        for at in range(0, 16, 4):
            part = x[at : at + 4]
            off = part @ v @ w - wanted[at : at + 4]
            dy = 2 * off / off.size
            v, w = v - 0.1 * part.T @ dy @ w.T, w - 0.1 * (part @ v).T @ dy
    assert onnxpar.training.merge(tmp_path / "run", model, tmp_path / "trained.onnx") == 2
    trained = {t.name: t for t in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    for name, value in (("v", v), ("w", w)):
        own = numpy_helper.to_array(trained[name])
        np.testing.assert_allclose(own, value, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="--batch 5"):
        onnxpar.training.train(par, data, lr=0.1, batch=5)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "misspelled": ({"device": 2}, TypeError, "did you mean 'devices'"),
    "unknown": ({"zzz": 2}, TypeError, "it has: devices, mesh"),
    "text for a number": ({"devices": "2"}, StrategyError, "devices='2' is of type str; give int"),
    "list for a mapping": ({"dims": [("a", 1)]}, StrategyError, "dims=.*give Mapping"),
    "text for a list": ({"passes": "x"}, StrategyError, "passes='x'.*give Sequence"),
    "unknown pass": ({"passes": ["nope"]}, StrategyError, "nope"),
    "unknown plugin": ({"plugin": ["no.such.module"]}, onnxpar.OnnxparError, "no.such.module"),
    "text for a pair": ({"states": ["a:b"]}, StrategyError, "'a:b' is no pair; give .INPUT, OUTP"),
    "bad mesh": ({"mesh": "dp"}, StrategyError, "dp"),
    "type of caches": ({"kv_dtype": "float8"}, StrategyError, "--kv-dtype float8: give float32, "),
    "negative pages": ({"page_size": -1}, StrategyError, "--page-size -1: a page has at least"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    asked, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        onnxpar.plan(DLRM, **asked)


def test_numbers_of_numpy_are_numbers() -> None:
    assert options_of({"devices": np.int64(2), "bucket_mb": np.float32(1)}).bucket_bytes == 1 << 20


def test_models_in_memory(tmp_path: Path) -> None:
    proto = onnx.load(DLRM)
    for number, model in enumerate((proto, proto.SerializeToString())):
        par = tmp_path / f"{number}.par"
        plan = onnxpar.shard(model, par, **TP)
        assert plan.model == f"{proto.graph.name}.onnx"
        assert onnxpar.plan(model, **TP).text() == plan.text()
    files = sorted(p.relative_to(tmp_path / "0.par") for p in (tmp_path / "0.par").rglob("*"))
    for file in files:
        assert (tmp_path / "0.par" / file).read_bytes() == (tmp_path / "1.par" / file).read_bytes()
    assert onnxpar.check(proto, **TP).ok
    onnxpar.annotate(proto, tmp_path / "annotated.onnx", **TP)
    assert onnx.load(tmp_path / "annotated.onnx").configuration


def test_models_in_memory_that_are_none(tmp_path: Path) -> None:
    proto = onnx.load(DLRM)
    with pytest.raises(InputError, match="give the folder"):
        onnxpar.shard(proto, **TP)
    with pytest.raises(ModelError, match="not an ONNX model"):
        onnxpar.plan(b"hello", **TP)
    with pytest.raises(ModelError, match="int is not a model"):
        onnxpar.plan(3, **TP)  # type: ignore[arg-type]
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    apart = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    with pytest.raises(ModelError, match=r"external file, .*give the model.s path"):
        onnxpar.plan(apart, **TP)
    assert onnxpar.plan(onnx.load(tmp_path / "m.onnx"), **TP).collectives
    del proto.graph.output[:]
    with pytest.raises(ModelError) as caught:
        onnxpar.plan(proto, **TP)
    assert "/onnxpar-" not in str(caught.value)


def test_every_call_that_takes_a_model_takes_one_in_memory() -> None:
    calls = [
        getattr(module, name) for module in (onnxpar, onnxpar.training) for name in module.__all__
    ]
    models = [
        (call.__name__, given.annotation)
        for call in calls
        if inspect.isfunction(call)
        for name, given in inspect.signature(call).parameters.items()
        if name == "model" and call is not onnxpar.training.train  # the file to shard again
    ]
    assert len(models) == 11 and {annotation for _, annotation in models} == {"Source"}


def test_choices_are_literals() -> None:
    """So that a type checker knows them; they are those of the command line."""
    (of,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name in ("preset", "search", "objective", "kv_dtype", "overlap"):
        hint = get_type_hints(onnxpar.PlanOptions)[name]
        (literal,) = (each for each in get_args(hint) if get_origin(each) is Literal)
        (action,) = (a for a in of.choices["shard"]._actions if a.dest == name)
        assert get_args(literal) == tuple(action.choices or ()), name
