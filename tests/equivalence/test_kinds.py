"""Kinds of folders that `shard` writes beside those of one program for one model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import options
from onnx import numpy_helper
from strategy.test_manual import HALO, HALO_NUMBERS, by_hand, how, normal, op, program
from trainer.test_length_buckets import LENGTHS, write
from training.steps import MLP, write_step

import onnxpar
from onnxpar.base.errors import InputError
from onnxpar.cli.command_line import main
from onnxpar.planner import sharder


def change(path: Path, name: str, amount: float = 1) -> None:
    """Adds to the first element of an initializer in a file."""
    model = onnx.load(path)
    tensor = next(t for t in model.graph.initializer if t.name == name)
    value = numpy_helper.to_array(tensor).copy()
    value.reshape(-1)[0] += np.asarray(amount, value.dtype)
    tensor.CopyFrom(numpy_helper.from_array(value, name))
    onnx.save(model, path)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: Any) -> list[Path]:
    """The steps of each length, the longest first; beside them, the ranks of all."""
    folder: Path = tmp_path_factory.mktemp("steps")
    made = [write(length, folder) for length in LENGTHS]
    sharder.shard(made[0], folder / "step.par", options("zero1 2"), shorter=made[1:])
    return made


def test_all_lengths_of_a_step(steps: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """In any order of the steps; the counts are those of all programs."""
    par = str(steps[0].with_name("step.par"))
    more = ["--shorter", str(steps[0]), "--shorter", str(steps[2]), "--least", "sampled"]
    assert main(["verify", str(steps[1]), par, *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one = onnxpar.verify(steps[0], par)
    assert found["ok"] and not found["assumed"]
    assert sum(found["proved"].values()) == found["nodes"] > 2 * one.nodes


def test_lengths_without_a_step_are_assumed(steps: list[Path]) -> None:
    par = steps[0].with_name("step.par")
    result = onnxpar.verify(steps[0], par, shorter=steps[1:2])
    assert result.ok and len(result.assumed) == 1
    assert "rank_*.length_2.onnx: the program for length=2 is not proved" in result.text()
    strict = onnxpar.verify(steps[0], par, least="sampled")
    assert not strict.ok and strict.failures[0].kind == "least"


def test_a_fault_in_the_program_of_a_length(steps: list[Path], tmp_path: Path) -> None:
    """It is found with the step of its length, and assumed away, by name, without."""
    par = tmp_path / "step.par"
    shutil.copytree(steps[0].with_name("step.par"), par)
    change(par / "rank_0001.length_5.onnx", "LocalSlice_w1@1::start")
    assert onnxpar.verify(steps[0], par, shorter=steps[2:]).ok
    (failure, *_) = onnxpar.verify(steps[0], par, shorter=steps[1:]).failures
    assert failure.text.startswith("at length=5: ")


def test_steps_of_other_lengths_are_named(steps: list[Path]) -> None:
    par, other = steps[0].with_name("step.par"), write(7, steps[0].parent)
    with pytest.raises(InputError, match=r"step7.onnx takes samples of none of the lengths"):
        onnxpar.verify(other, par)
    with pytest.raises(InputError, match=r"the same length as"):
        onnxpar.verify(steps[0], par, shorter=[steps[1], steps[1]])
    sharder.shard(other, other.with_name("one.par"), options("zero1 2"))
    with pytest.raises(InputError, match=r"has one program for all samples"):
        onnxpar.verify(other, other.with_name("one.par"), shorter=steps[1:])


def test_shard_proves_all_lengths_first(steps: list[Path], tmp_path: Path) -> None:
    par = tmp_path / "step.par"
    given = [str(steps[0]), "--devices", "2", "--preset", "zero1", "-o", str(par), "--verify"]
    assert main(["shard", *given, *[f"--shorter={step}" for step in steps[1:]]]) == 0
    assert not onnxpar.verify(steps[0], par, shorter=steps[1:]).assumed


WIDE = """wide (float[8,60] x, float[60,40] w1, float[40] w2, float[40,50] w3, float[50] w4)
=> (float[8,50] y) { h = Gemm(x, w1, w2)  r = Relu(h)  y = Gemm(r, w3, w4) }"""


def compressed(folder: Path, layout: str, to: str) -> tuple[Path, Path]:
    """A step whose gradients travel in fewer bits."""
    step, par = write_step(WIDE, folder, optimizer="adamw"), folder / "step.par"
    sharder.shard(step, par, replace(options(layout), compression=to))
    return step, par


@pytest.mark.parametrize(
    "change", [{"lengths": [{}]}, {"lengths": [{"program": "", "sizes": [3]}]}, {"lengths": 5}]
)
def test_lengths_that_are_none(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, par = write_step(MLP, tmp_path), tmp_path / "step.par"
    sharder.shard(step, par, options("data-parallel 2"))
    plan = json.loads((par / "plan.json").read_text())
    (par / "plan.json").write_text(json.dumps({**plan, **change}))
    assert main(["verify", str(step), str(par)]) == 2
    assert "lengths that are none" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["data-parallel 2", "zero1 2"])
@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_compressed_sums_are_assumed(to: str, layout: str, tmp_path: Path) -> None:
    step, par = compressed(tmp_path, layout, to)
    result = onnxpar.verify(step, par)
    (reason,) = result.assumed.values()
    assert result.ok and reason.startswith(f"what is added up in {to} is taken for the sum")
    assert result.proved["assumed"] == 2 and f"  assumed: {min(result.assumed)}" in result.text()
    strict = onnxpar.verify(step, par, least="sampled")
    assert not strict.ok and strict.failures[0].kind == "least"


def test_faults_of_compressed_sums_are_refused(tmp_path: Path) -> None:
    """The parts that ranks add up must be all parts, and come back to their places."""
    step, par = compressed(tmp_path, "data-parallel 2", "float16")
    files = [par / f"rank_000{rank}.onnx" for rank in range(2)]
    kept = [file.read_bytes() for file in files]
    (name,) = onnxpar.verify(step, par).assumed
    for key, value in (("op", "max"), ("group", None)):
        for rank, data in enumerate(kept):
            model = onnx.load_from_string(data)
            node = next(n for n in model.graph.node if n.name == name)
            others = [a for a in node.attribute if a.name != key]
            del node.attribute[:]
            node.attribute.extend([*others, onnx.helper.make_attribute(key, value or [rank])])
            onnx.save(model, files[rank])
        assert not onnxpar.verify(step, par).ok


def test_numbers_of_the_model_in_16_bits_are_not_assumed(tmp_path: Path) -> None:
    """A step that computes its gradients in bfloat16 itself."""
    step = write_step(WIDE, tmp_path, optimizer="adamw", precision="bfloat16")
    sharder.shard(step, tmp_path / "step.par", options("data-parallel 2"))
    result = onnxpar.verify(step, tmp_path / "step.par")
    assert result.ok and not result.assumed


def manual(folder: Path, nodes: list[Any], x: list[int], layout: list[Any], **weights: Any) -> Path:
    """The ranks of a manual program from x to y, over an axis r of 3 ranks."""
    path = program(folder, nodes, {"x": x}, {"y": ["n", *x[1:]]}, **weights)
    sharder.shard(path, folder / "manual.par", how("r=3", {"x": layout, "y": layout}))
    return folder / "manual.par"


def unsplit(folder: Path, nodes: list[Any], x: list[int], **weights: Any) -> Path:
    (folder / "unsplit").mkdir()
    return program(folder / "unsplit", nodes, {"x": x}, {"y": x}, **weights)


def test_a_manual_program_against_the_unsplit_model(tmp_path: Path) -> None:
    """Each rank takes its rows by its number and the size of its input."""
    nodes = [
        by_hand("Rank", [], ["rank"]),
        by_hand("GroupSize", [], ["ranks"]),
        op("Shape", ["x"], ["shape"]),
        op("Gather", ["shape", "zero"], ["rows"]),
        op("Div", ["rows", "ranks"], ["shard"]),
        op("Mul", ["rank", "shard"], ["begin"]),
        op("Add", ["begin", "shard"], ["end"]),
        op("Unsqueeze", ["begin", "axes"], ["begins"]),
        op("Unsqueeze", ["end", "axes"], ["ends"]),
        op("Slice", ["x", "begins", "ends", "axes"], ["mine"]),
        op("Exp", ["mine"], ["exp"]),
        by_hand("AllGather", ["exp"], ["y"], axis=0),
    ]
    par = manual(tmp_path, nodes, [6, 2], [None, None], zero=np.array(0), axes=np.array([0]))
    result = onnxpar.verify(unsplit(tmp_path, [op("Exp", ["x"], ["y"])], [6, 2]), par)
    assert result.ok and result.proved == {"lemma": 1}


@pytest.mark.parametrize("is_right", [True, False])
def test_a_manual_halo(is_right: bool, tmp_path: Path) -> None:
    """Parts with their neighbours' edges; and with the last padding on another rank."""
    w = normal(1, 1, 3)
    weights = {**HALO_NUMBERS, "two": np.array(2 if is_right else 1), "w": w}
    path = program(tmp_path, HALO, {"x": [1, 1, 4]}, {"y": [1, 1, 4]}, **weights)
    space = [None, None, "r"]
    sharder.shard(path, tmp_path / "m.par", how("r=3", {"x": space, "y": space}))
    conv = op("Conv", ["x", "w"], ["y"], pads=[1, 1])
    whole = unsplit(tmp_path, [conv], [1, 1, 12], w=w)
    assert onnxpar.verify(whole, tmp_path / "m.par").ok == is_right


def test_the_program_of_one_rank_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    par = manual(tmp_path, [by_hand("AllReduce", ["x"], ["y"])], [4, 2], [None, None])
    assert main(["verify", str(tmp_path / "program.onnx"), str(par)]) == 2
    err = capsys.readouterr().err
    assert "the program of one rank" in err and "give the unsplit model" in err
    whole = unsplit(tmp_path, [op("Identity", ["x"], ["y"])], [4, 2])
    assert not onnxpar.verify(whole, par).ok


def test_an_output_whose_size_data_decide(tmp_path: Path) -> None:
    """Ranks hold all of it."""
    text = "found (float[6,4] x) => (int64[2,K] y) { r = Relu(x)  y = NonZero(r) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    onnx.save(model, tmp_path / "model.onnx")
    onnxpar.shard(tmp_path / "model.onnx", tmp_path / "model.par", devices=2)
    result = onnxpar.verify(tmp_path / "model.onnx", tmp_path / "model.par")
    assert result.ok and result.proved["whole"] == 1, result.text()


@pytest.mark.parametrize("layout", ["data-parallel 2", "zero1 2", "hybrid dp=2,tp=2"])
def test_sums_of_two_bits_are_assumed(layout: str, tmp_path: Path) -> None:
    step, par = compressed(tmp_path, layout, "2bit")
    result = onnxpar.verify(step, par)
    assert result.ok, result.text()
    assert "Gemm_h.grad/Gemm.2" in result.assumed["AllGather_compressed.1::codes"]
    assert "w1.residual.next" in result.assumed
    assert not onnxpar.verify(step, par, least="sampled").ok


def test_faults_in_sums_of_two_bits_are_refused(tmp_path: Path) -> None:
    """Codes in other places of a byte, another threshold on a rank, and lost remainders."""
    step, par = compressed(tmp_path, "data-parallel 2", "2bit")
    files = [par / f"rank_000{rank}.onnx" for rank in range(2)]
    kept = [file.read_bytes() for file in files]
    for name in ("weights", "threshold"):
        change(files[1], f"compressed.1::{name}")
        assert not onnxpar.verify(step, par).ok
        files[1].write_bytes(kept[1])
    for file in files:
        model = onnx.load(file)
        names = {name: node for node in model.graph.node for name in node.output}
        row = names[names["w3.residual.next::piece"].input[0]]
        row.input[2] = row.input[1]
        onnx.save(model, file)
    assert not onnxpar.verify(step, par).ok


def test_a_loss_counts_the_samples_that_it_does_not_ignore(tmp_path: Path) -> None:
    """Ranks divide by all samples: that is right only if no label is ignored."""
    step, par = write_step(WIDE, tmp_path, optimizer="adamw"), tmp_path / "step.par"
    sharder.shard(step, par, options("hybrid dp=2,tp=2"))
    assert onnxpar.verify(step, par).ok
    for file in par.glob("rank_????.onnx"):
        model = onnx.load(file)
        (loss,) = (node for node in model.graph.node if "loss/Div.15" in node.output)
        loss.op_type = "Identity"
        del loss.input[1]
        onnx.save(model, file)
    assert "loss/Div.15" in {failure.tensor for failure in onnxpar.verify(step, par).failures}
