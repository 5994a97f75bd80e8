"""differentiate, as a pass among others."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest
from pass_texts import compare_golden, texts_after
from small_models import HEAD
from training.steps import LINEAR, MLP, write_model

from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.layout.mesh import Mesh
from onnxpar.planner.context import load_model, make_context
from onnxpar.planner.options import Options
from onnxpar.planner.pass_registry import parse_passes
from onnxpar.planner.run_passes import run_passes

TEXT = """mlp (float[4,3] x) => (float[4,2] y)
<float[3,2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}, float[2,2] v = {1, 2, 3, 4}>
{ h = Gemm(x, w, b)  r = Relu(h)  y = MatMul(r, v) }"""
PASSES = (
    "differentiate{loss=mse},annotate-strategy,propagate-layouts,insert-collectives,fuse-all-reduces,"
    "localize-ops"
)


def test_golden(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The loss and the gradients of all weights are pending over the batch: one all-reduce."""
    path = tmp_path / "mlp.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + TEXT), path)
    options = Options(mesh=Mesh.parse("dp=2"), preset="data-parallel")
    model = load_model(path, options, for_training=True)
    shown = texts_after(PASSES, model, make_context(model, options))
    found = "\n".join(text for text in shown if not text.startswith("// after annotate"))
    compare_golden("gradients", found, request)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_model(MLP, tmp_path))
    how = ["--devices", "2", "--preset", "data-parallel"]
    passes = "differentiate,propagate-layouts,insert-collectives,fuse-all-reduces{by=size}"
    assert main(["opt", path, *how, "--passes", passes, "--dump", str(tmp_path / "dump")]) == 0
    assert sorted(p.name for p in (tmp_path / "dump").glob("*.onnxtxt")) == [
        "01-differentiate.onnxtxt",
        "02-annotate-strategy.onnxtxt",
        "03-propagate-layouts.onnxtxt",
        "04-insert-collectives.onnxtxt",
        "05-fuse-all-reduces.onnxtxt",
    ]
    before, after = (
        (tmp_path / "dump" / f"{name}.onnxtxt").read_text().count("onnxpar.reshard.AllReduce")
        for name in ("04-insert-collectives", "05-fuse-all-reduces")
    )
    assert before > after >= 1
    capsys.readouterr()
    chosen = "differentiate{params=w3,loss=mse}"
    assert main(["opt", path, *how, "--passes", chosen]) == 0
    shown = capsys.readouterr().out
    assert "w3.grad" in shown and "w1.grad" not in shown and "target" in shown


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ("differentiate{params=v}", "--params v matches no weight"),
        ("differentiate{loss=hinge}", "'hinge': give one of softmax-cross-entropy"),
        ("differentiate{output=z}", "output 'z': the model has no such output; its outputs: y"),
        ("differentiate{rate=1}", "rate"),
    ],
)
def test_options_that_do_not_fit(
    passes: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_model(LINEAR, tmp_path))
    assert main(["opt", path, "--devices", "2", "--passes", passes]) == 2
    assert message in capsys.readouterr().err


def test_open_sizes_are_refused(tmp_path: Path) -> None:
    path = write_model(LINEAR.replace("4,", "n,"), tmp_path)
    options = Options(devices=2, preset="data-parallel")
    model = load_model(path, options, for_training=True)
    ctx = make_context(model, options)
    with pytest.raises(Exception, match="these sizes are open: n; set each with --dim") as caught:
        run_passes(model, ctx, parse_passes("differentiate"))
    assert not isinstance(caught.value, StrategyError)
