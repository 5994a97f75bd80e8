"""Passes and rules from outside: where they run, what they must state, and what is said of bad
ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import pytest

from onnxpar.base.errors import PassError, StrategyError
from onnxpar.cli.command_line import main
from onnxpar.compiler.pass_ import LAYOUTS, LOCAL, Pass, PassContext, Stage
from onnxpar.load.load import load
from onnxpar.planner import pass_registry, plugins
from onnxpar.planner.default_passes import DEFAULT_PASSES
from onnxpar.planner.options import Options
from onnxpar.planner.pass_registry import parse_passes, parse_placed
from onnxpar.planner.placed_passes import Placed, insert
from onnxpar.planner.sharder import plan
from onnxpar.rules import rule as rule_module
from onnxpar.rules.rule import registered, rule

MODEL = """<ir_version: 8, opset_import: ["" : 18]>
m (float[4,6] x) => (float[4,6] y) { h = Relu(x)  y = Exp(h) }"""


@dataclass(frozen=True)
class Note(Pass):
    """Note which facts hold."""

    name: ClassVar[str] = "note"
    stage = Stage.LOWER
    requires = (LAYOUTS,)
    excludes = (LOCAL,)
    level: float = 0.5
    loud: bool = False

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        assert ctx.layouts and not ctx.lowered.localized
        return False


@dataclass(frozen=True)
class Break(Pass):
    """Leave a node behind, then fail."""

    name: ClassVar[str] = "break"

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        made = gs.Variable("made", "float32", [4, 6])
        graph.nodes.append(gs.Node("Abs", "odd", {}, [graph.inputs[0]], [made]))
        raise KeyError("nothing there")


@dataclass(frozen=True)
class Shapeless(Pass):
    """Leave a tensor without a shape."""

    name: ClassVar[str] = "shapeless"

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        made = gs.Variable("made")
        graph.nodes.append(gs.Node("Abs", "odd", {}, [graph.inputs[0]], [made]))
        return True


@dataclass(frozen=True)
class Rename(Pass):
    """Make the first node another op."""

    op: str = "Abs"
    name: ClassVar[str] = "rename"
    stage = Stage.REWRITE

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        graph.nodes[0].op, graph.nodes[0].name = self.op, "h"
        return True


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model."""
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {"note": Note, "break": Break})


def default() -> list[Pass]:
    """The passes of every plan."""
    return [kind() for kind in DEFAULT_PASSES]


@pytest.mark.parametrize("where", [{"after": "insert-collectives"}, {"before": "localize-ops"}])
def test_a_pass_runs_in_its_place(where: dict[str, str], model: Path) -> None:
    placed = Placed(Note(), **where)
    names = [p.name for p in insert(default(), [placed])]
    at = names.index("note")
    assert where.get("after") in (None, names[at - 1])
    assert where.get("before") in (None, names[at + 1])
    plan(model, Options(devices=2, passes=[placed]))


@pytest.mark.parametrize(
    "placed,said",
    [
        (Note(), "is of the stage LOWER: give its place"),
        (Placed(Note(), before="insert-collectives"), "note requires layouts, which no pass"),
        (Placed(Note(), after="localize-ops"), "note cannot run once there are local nodes"),
        (Placed(Note(), after="nowhere"), "no pass 'nowhere' runs here; there are annotate"),
        (Placed(Break(), after="insert-collectives"), "of the stage REWRITE and cannot run after"),
    ],
)
def test_a_wrong_place_is_an_error(placed: Pass | Placed, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        insert(default(), [placed])


def test_two_places_are_an_error() -> None:
    with pytest.raises(StrategyError, match="not both"):
        Placed(Note(), before="a", after="b")


def test_text_of_passes() -> None:
    assert parse_placed("note{level=2.5, loud=true} after insert-collectives") == Placed(
        Note(2.5, True), after="insert-collectives"
    )
    assert parse_passes("propagate-layouts,insert-collectives,note{level=1}")[-1] == Note(1.0)
    for text, said in [
        ("nothing", "no pass 'nothing'; there are differentiate"),
        ("note{level=high}", "note has no option 'level=high'; it has: level, loud"),
        ("note{loud=yes}", "note has no option 'loud=yes'"),
    ]:
        with pytest.raises(StrategyError, match=said):
            parse_placed(text)


def test_own_passes_state_what_they_need() -> None:
    with pytest.raises(StrategyError, match="localize-ops requires layouts"):
        parse_passes("propagate-layouts,localize-ops")
    with pytest.raises(StrategyError, match="order-collectives requires local nodes"):
        parse_passes("propagate-layouts,insert-collectives,order-collectives")
    with pytest.raises(
        StrategyError, match=r"insert-collectives requires propagated .* run propagate"
    ):
        parse_passes("insert-collectives")


def test_a_pass_that_fails_names_itself_and_is_dumped(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(model).graph  # the model itself is good
    how = ["--devices", "2", "--add-pass", "break", "--dump", str(tmp_path / "dump")]
    assert main(["shard", str(model), *how, "-o", str(tmp_path / "m.par")]) == 2
    assert "pass break failed: KeyError: 'nothing there'" in capsys.readouterr().err
    assert "Abs(x)" in (tmp_path / "dump" / "01-break.onnxtxt").read_text()
    assert not (tmp_path / "m.par").exists()


def test_a_failure_of_the_compiler_names_the_pass_and_those_before_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxpar.passes.lower.localize_ops import LocalizeOps

    def fail(self: LocalizeOps, graph: gs.Graph, ctx: PassContext) -> bool:
        raise AssertionError("odd")

    monkeypatch.setattr(LocalizeOps, "run", fail)
    said = "pass localize-ops failed after annotate-strategy, propagate-layouts, insert.*: odd"
    with pytest.raises(PassError, match=said):
        plan(model, Options(devices=2))


def test_what_a_pass_leaves_is_checked(model: Path) -> None:
    with pytest.raises(PassError, match=r"pass shapeless left 'made', which Abs 'odd' makes"):
        plan(model, Options(devices=2, passes=[Shapeless()]))
    with pytest.raises(PassError, match=r"pass rename left Sigmoyd 'h', an op that opset 18 does"):
        plan(model, Options(devices=2, passes=[Rename("Sigmoyd")]))
    with pytest.raises(PassError, match=r"pass rename left MatMul 'h' with 1 input; it takes 2"):
        plan(model, Options(devices=2, passes=[Rename("MatMul")]))
    assert plan(model, Options(devices=2, passes=[Rename("Sum")]))


def test_a_package_imports_its_passes_from_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "passes_of_a_package"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import Quiet\n")
    (package / "inner.py").write_text(
        "from onnxpar.compiler.pass_ import Pass\n"
        "class Quiet(Pass):\n  name = 'quiet'\n  def run(self, graph, ctx): return False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plugins.load_plugin("passes_of_a_package")
    assert "quiet" in plugins.registered_passes()


@pytest.mark.parametrize(
    "text,said",
    [
        ("import nothing_like_that", "ModuleNotFoundError: No module named"),
        ("1 / 0", "ZeroDivisionError"),
        (
            "from onnxpar.rules.rule import *\n@rule('MatMul')\ndef f(node): ...",
            "MatMul already has a rule, onnxpar.rules.contraction.",
        ),
        (
            "from onnxpar.compiler.pass_ import Pass\n"
            "class P(Pass):\n  name = 'note'\n  def run(self, graph, ctx): ...",
            "two passes are called 'note'",
        ),
        (
            "from onnxpar.compiler.pass_ import Pass\n"
            "class P(Pass):\n  def run(self, graph, ctx): ...",
            "a pass needs a `name`",
        ),
    ],
)
def test_bad_plugins_are_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / f"bad_plugin_{abs(hash(text))}.py"
    file.write_text(text)
    with pytest.raises(StrategyError, match=said.replace("(", r"\(")):
        plugins.load_plugin(str(file))


def test_a_pass_with_the_name_of_one_of_onnxpar_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = next(iter(pass_registry.OWN))
    monkeypatch.setattr(pass_registry, "registered_passes", lambda: {own: Note})
    with pytest.raises(StrategyError, match=f"a plugin has a pass called '{own}', but onnxpar has"):
        pass_registry.by_name()


def test_missing_plugins_are_named() -> None:
    with pytest.raises(StrategyError, match="--plugin: there is no file"):
        plugins.load_plugin("nowhere/at_all.py")
    with pytest.raises(StrategyError, match="--plugin nowhere: ModuleNotFoundError"):
        plugins.load_plugin("nowhere")


def test_rules_are_replaced_only_where_that_is_said() -> None:
    function = registered()["", "Sin"]
    assert rule("Sin", replace=True)(function) is function


INSTALLED = {
    "outside_rules.py": "from onnxpar.rules.rule import rule, einsum\n"
    "@rule('Outside', domain='outside')\ndef outside(node): return einsum(node, 'a -> a')\n",
    "outside_passes.py": "from onnxpar.compiler.pass_ import Pass\n"
    "class Outside(Pass):\n    'Do nothing.'\n    name = 'outside'\n"
    "    def run(self, graph, ctx): return False\n",
    "outside-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n",
    "outside-1.0.dist-info/entry_points.txt": "[onnxpar.rules]\nrules = outside_rules\n"
    "[onnxpar.passes]\noutside = outside_passes:Outside\n",
}


def test_installed_packages_add_passes_and_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in INSTALLED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rule_module, "_RULES", dict(registered()))
    monkeypatch.setattr(plugins, "_registered", dict(plugins._registered))
    plugins.load_entry_points.cache_clear()
    assert "outside" in plugins.registered_passes()
    assert ("outside", "Outside") in registered()
    points = tmp_path / "outside-1.0.dist-info" / "entry_points.txt"
    points.write_text("[onnxpar.rules]\nrules = outside_gone\n")
    plugins.load_entry_points.cache_clear()
    with pytest.raises(StrategyError, match=r"outside adds outside_gone to onnxpar\.rules, which"):
        plugins.registered_passes()
    points.unlink()
    plugins.load_entry_points.cache_clear()
