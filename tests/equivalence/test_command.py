"""`onnxpar verify`: what it prints, and its exit status."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

import onnxpar
from onnxpar.base.errors import InputError, UnprovedError
from onnxpar.cli.command_line import main
from onnxpar.lowering.weights import WeightStore

MODELS = Path(__file__).parents[2] / "models"
MANY = '{"mesh": [["tp", 100000]], "inputs": [], "outputs": []}'
VIT = MODELS / "vit.dynamo.static.onnx"


@pytest.fixture(scope="module")
def par(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit") / "vit.par"
    onnxpar.shard(VIT, folder, devices=2, preset="tensor-parallel")
    return folder


def test_a_proof(par: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(VIT), str(par)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"the ranks of {par} compute {VIT}: logits")
    assert "nodes over 2 ranks" in text and "sizes: as in the file" in text


def test_as_json(par: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(VIT), str(par), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and sum(result["proved"].values()) == result["nodes"]


def test_least(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The units of experts are compared on drawn values."""
    model, folder = MODELS / "mixtral.dynamo.static.onnx", tmp_path / "m.par"
    onnxpar.shard(model, folder, devices=2, preset="tensor-parallel")
    assert main(["verify", str(model), str(folder), "--least", "lemma"]) == 1
    assert "proved in a weaker way than lemma" in capsys.readouterr().out


def test_another_model(par: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = MODELS / "bert.dynamo.static.onnx"
    assert main(["verify", str(other), str(par)]) == 2
    assert "was not made from" in capsys.readouterr().err


def test_trained_on(par: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model with other weights."""
    model = onnx.load(VIT)
    weight = max(model.graph.initializer, key=lambda t: len(t.raw_data))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 2, weight.name))
    onnx.save(model, tmp_path / "model.onnx")
    assert main(["verify", str(tmp_path / "model.onnx"), str(par)]) == 1
    assert "not proved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("break_", "text"),
    [
        (lambda par: (par / "plan.json").unlink(), "cannot be read"),
        (lambda par: (par / "plan.json").write_text("{"), "is not JSON"),
        (lambda par: (par / "plan.json").write_text("{}"), "lacks a mesh"),
        (lambda par: (par / "plan.json").write_text(MANY), "100000 ranks"),
        (lambda par: (par / "rank_0001.onnx").unlink(), "rank_0001.onnx cannot be read"),
        (lambda par: (par / "rank_0001.onnx").write_bytes(b"no model"), "cannot be read"),
        (lambda par: [f.unlink() for f in par.glob("*.weights")], "cannot be read"),
    ],
)  # fmt: skip
def test_damaged_folders(
    break_: object, text: str, par: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "broken.par"
    shutil.copytree(par, folder)
    break_(folder)  # type: ignore[operator]
    assert main(["verify", str(VIT), str(folder)]) == 2
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1


def test_unknown_sizes(par: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(VIT), str(par), "--dim", "batch=2"]) == 2
    assert "the open sizes of" in capsys.readouterr().err


def _odd(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(par: Path) -> None:
        plan = json.loads((par / "plan.json").read_text())
        change(plan)
        (par / "plan.json").write_text(json.dumps(plan))

    return apply


def _size(value: object) -> Callable[[Path], None]:
    return _odd(lambda plan: plan["inputs"][0]["layout"]["dims"][0].update(size=value))


def _nested(plan: dict[str, Any]) -> None:
    plan["inputs"][0]["layout"]["dims"][0] = {"product": [{"size": 1 << 20}] * 3}


ODD_PLANS: dict[str, Callable[[Path], None]] = {
    "weights without names": _odd(lambda plan: plan["weights"].append({})),
    "a power": _size("9**9**9"),
    "a long product": _size("*".join(["9"] * 900)),
    "a deep expression": _size("(" * 3000 + "1" + ")" * 3000),
    "a division by zero": _size("1//0"),
    "a NUL": _size("\0"),
    "a huge size": _size(1 << 60),
    "a negative size": _size(-1),
    "another size than the model's": _size(1000),
    "a list": _size([1]),
    "a shape that is a text": _odd(lambda plan: plan["inputs"][0].update(shape="abc")),
    "a huge shape": _odd(lambda plan: plan["inputs"][0].update(shape=[10**40, 1, 1, 1])),
    "a product of huge factors": _odd(_nested),
    "a state twice": _odd(lambda plan: plan.update(states=[{"input": "x", "output": "y"}] * 2)),
    "an axis twice": _odd(lambda plan: plan.update(mesh=[["tp", 2], ["tp", 2]])),
    "a mesh of no ranks": _odd(lambda plan: plan.update(mesh=[["tp", 0]])),
    "a large mesh": _odd(lambda plan: plan.update(mesh=[["tp", 1 << 60]])),
    "nesting": lambda par: _write(par, "[" * 100_000),
}


def _write(par: Path, text: str) -> None:
    (par / "plan.json").write_text(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ODD_PLANS)
def test_odd_plans(
    name: str, par: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "odd.par"
    shutil.copytree(par, folder)
    ODD_PLANS[name](folder)
    assert main(["verify", str(VIT), str(folder)]) == 2
    err = capsys.readouterr().err
    assert "plan.json" in err and err.count("\n") == 1, err


def test_shard_proves_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "vit.par"
    given = [str(VIT), "--devices", "2", "--preset", "tensor-parallel", "-o", str(folder)]
    assert main(["shard", *given, "--verify", "--for-any-host"]) == 0
    text = capsys.readouterr().out
    assert f"the ranks of {folder} compute {VIT}" in text and f"written to {folder}" in text
    assert onnxpar.verify(VIT, folder).ok


def test_shard_writes_nothing_that_is_not_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that cuts a weight wrongly; the older folder stays."""
    folder, cut = tmp_path / "vit.par", WeightStore.cut
    onnxpar.shard(VIT, folder, devices=2)
    before = sorted((path.name, path.read_bytes()) for path in folder.iterdir())

    def swapped(self: WeightStore, name: str, *how: Any, **more: Any) -> Any:
        shards = cut(self, name, *how, **more)
        return shards[::-1] if len({s.SerializeToString() for s in shards}) == 2 else shards

    monkeypatch.setattr(WeightStore, "cut", swapped)
    given = [str(VIT), "--devices", "2", "--preset", "tensor-parallel", "-o", str(folder)]
    assert main(["shard", *given, "--verify", "--for-any-host"]) == 1
    text = capsys.readouterr().out
    assert text.startswith(f"{folder} is not written.\nnot proved: ")
    assert sorted((path.name, path.read_bytes()) for path in folder.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["vit.par"]
    with pytest.raises(UnprovedError, match="is not written"):
        onnxpar.shard(VIT, folder, devices=2, preset="tensor-parallel", verify=True)


def test_a_part_of_the_ranks_is_not_proved(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--verify needs the files of all ranks"):
        onnxpar.shard(VIT, tmp_path / "m.par", devices=2, ranks=[0], verify=True)
