"""Copies of one parameter that an exporter stored are trained as one, against closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from committed import MODELS
from onnx import TensorProto, helper, numpy_helper
from training.steps import Array, ThreadTrainer, shard

from onnxpar.base.errors import InputError
from onnxpar.cli.command_line import main
from onnxpar.graph.training_spec import Slot, Step
from onnxpar.trainer.checkpoint import Progress
from onnxpar.trainer.export_weights import export_weights
from onnxpar.trainer.merge import merge
from onnxpar.training import grad

EXPORTED = "pkg.torch.export.ExportedProgram.graph_signature"
CALL = "pkg.torch.onnx.fx_node"
SCOPES = "pkg.torch.onnx.name_scopes"
ROWS, WIDTH, RATE = 7, 5, 0.3
IDS = np.array([3, 0, 4, 3], np.int64)


def draw(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def write(
    folder: Path, weights: Mapping[str, Array], reads: Sequence[str], parameters: str = ""
) -> Path:
    """Saves a model: it looks rows up in the first weight, and multiplies them by each of `reads`,
    entries `NAME` or, as dynamo's exporter says it, `NAME=CALL OF TORCH`; y is the sum."""
    table = next(iter(weights))
    nodes = [helper.make_node("Gather", [table, "ids"], ["rows"], "/emb/Gather")]
    nodes.append(helper.make_node("Tanh", ["rows"], ["h"]))
    for i, read in enumerate(reads):
        name, _, call = read.partition("=")
        node = helper.make_node("MatMul", ["h", name], [f"p{i}"], f"/head/MatMul_{i}" * (not call))
        if call:
            text = (
                f"%m : [num_users=1] = call_function[target=torch.ops.aten.{call}, kwargs = {{}})"
            )
            node.metadata_props.add(key=CALL, value=text)
        nodes.append(node)
    nodes.append(helper.make_node("Sum", [f"p{i}" for i in range(len(reads))], ["y"]))
    width = weights[reads[0].partition("=")[0]].shape[1]
    graph = helper.make_graph(
        nodes,
        "tied",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, width])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    if parameters:
        lines = [f"p_{n.replace('.', '_')}: PARAMETER target='{n}'" for n in parameters.split()]
        graph.metadata_props.add(key=EXPORTED, value="\n".join(lines))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def trained(model: Path, layout: str) -> tuple[dict[str, Array], list[Slot]]:
    """The parameters after one step, and their slots; checkpoints the step in `c`."""
    step = model.with_name("step.onnx")
    grad(model, step, loss="mse", optimizer="sgd")
    spec = Step.of(onnx.load(step))
    assert spec is not None
    width = onnx.load(model).graph.output[0].type.tensor_type.shape.dim[1].dim_value
    with ThreadTrainer(shard(step, layout)[0]) as trainer:
        trainer.step({"ids": IDS, "target": np.zeros((4, width), np.float32)}, RATE)
        trainer.save(model.parent / "c", Progress(1))
        values = {s.input: trainer.session.states.read(s.input) for s in spec.parameters}
    return values, spec.parameters


def moved(table: Array, heads: int) -> Array:
    """The table after a step of SGD on mean((heads * tanh(table[ids]) @ table.T)**2)."""
    h = np.tanh(table[IDS].astype(np.float64))
    y = heads * h @ table.T
    by_y = 2 * y / y.size * heads
    gradient = by_y.T @ h
    np.add.at(gradient, IDS, (by_y @ table) * (1 - h * h))
    return table - RATE * gradient


@pytest.mark.parametrize("layout", ["data-parallel 2", "tensor-parallel 3", "zero3 2"])
def test_a_table_that_is_also_the_head(layout: str, tmp_path: Path) -> None:
    """TorchScript's exporter stores it and its transpose, and does not say that these are one."""
    table = draw(ROWS, WIDTH)
    folded = "onnx::MatMul_9"
    model = write(tmp_path, {"emb.weight": table, folded: table.T.copy()}, [folded])
    with pytest.warns(match=r"emb\.weight \(and onnx::MatMul_9\): equal in the file, and trained"):
        after, slots = trained(model, layout)
    assert [(s.input, s.torch) for s in slots] == [("emb.weight", ["emb.weight", "head.weight"])]
    np.testing.assert_allclose(after["emb.weight"], moved(table, 1), rtol=2e-6, atol=2e-6)
    assert merge(tmp_path / "c", model, tmp_path / "merged.onnx") == 2
    merged = {
        t.name: numpy_helper.to_array(t)
        for t in onnx.load(tmp_path / "merged.onnx").graph.initializer
    }
    np.testing.assert_array_equal(merged["emb.weight"], after["emb.weight"])
    np.testing.assert_array_equal(merged[folded], after["emb.weight"].T)


def test_a_square_matrix_and_its_transpose(tmp_path: Path) -> None:
    """The shapes do not tell which copy is transposed: one is, and one is not."""
    table = draw(WIDTH, WIDTH)
    weights = {"emb.weight": table, "permute": table.T.copy(), "val_2": table.T.copy()}
    reads = [
        "permute=matmul.default](args = (%h, %permute)",
        "val_2=linear.default](args = (%h, %p_emb_weight)",
    ]
    model = write(tmp_path, weights, reads, "emb.weight")
    after, (slot,) = trained(model, "tensor-parallel 2")
    assert slot.stored == {"emb.weight": False, "permute": True, "val_2": True} and slot.torch == [
        "emb.weight"
    ]
    np.testing.assert_allclose(after["emb.weight"], moved(table, 2), rtol=3e-6, atol=3e-6)


LINEARS = [
    "val_1=linear.default](args = (%h, %p_q_weight, %p_q_bias)",
    "val_2=linear.default](args = (%h, %p_target_weight)",
]


def test_equal_parameters_that_the_file_tells_apart(tmp_path: Path) -> None:
    """A copied network begins with equal weights; a product of one of them, of which the file does
    not say the parameter, is of either, and is not trained."""
    head = draw(WIDTH, ROWS)
    weights = {"emb.weight": draw(ROWS, WIDTH), "val_1": head, "val_2": head, "permute": head}
    reads = [*LINEARS, "permute=matmul.default](args = (%h, %permute)"]
    model = write(tmp_path, weights, reads, "emb.weight q.weight target.weight")
    with pytest.warns(match=r"permute \(5x7\) is not trained: made by the exporter"):
        _, slots = trained(model, "data-parallel 2")
    assert [(s.input, s.torch, s.stored) for s in slots] == [
        ("emb.weight", [], {}),
        ("q.weight", ["q.weight"], {"val_1": False}),
        ("target.weight", ["target.weight"], {"val_2": False}),
    ]


def test_a_linear_that_is_called_twice(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The file says that both are one parameter; no warning is due."""
    head = draw(WIDTH, 40)
    weights = {"emb.weight": draw(ROWS, WIDTH), "val_1": head, "val_2": head}
    reads = [LINEARS[0], LINEARS[0].replace("val_1", "val_2")]
    model = write(tmp_path, weights, reads, "emb.weight q.weight")
    after, slots = trained(model, "tensor-parallel 2")
    assert not [w for w in recwarn if "equal in the file" in str(w.message)]
    name, stored = "q.weight", {"val_1": False, "val_2": False}
    assert slots[1] == Slot(name, f"{name}.next", "parameter", name, True, [name], True, stored)
    h = np.tanh(weights["emb.weight"][IDS].astype(np.float64))
    y = 2 * h @ head
    expected = head - RATE * h.T @ (2 * y / y.size) * 2
    np.testing.assert_allclose(after["q.weight"], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["val_1", "own"])
def test_equal_by_chance(name: str, tmp_path: Path) -> None:
    """Zeros, as for adapters, and matrices that no exporter made."""
    first = draw(WIDTH, ROWS) if name == "own" else np.zeros((WIDTH, ROWS), np.float32)
    weights = {"emb.weight": draw(ROWS, WIDTH), "w": first, name: first}
    model = write(
        tmp_path, weights, ["w", name], f"emb.weight w {'own' if name == 'own' else 'other'}"
    )
    _, slots = trained(model, "data-parallel 2")
    last = "own" if name == "own" else "head.weight"  # by the path of its node
    assert [s.input for s in slots] == ["emb.weight", "w", last]


def test_weights_of_tied_modules(tmp_path: Path) -> None:
    """They may have either name, or both with the same values; both are written."""
    safetensors = pytest.importorskip("safetensors.numpy")
    table, other = draw(ROWS, WIDTH), draw(WIDTH, ROWS).T.copy()
    model = write(
        tmp_path,
        {"head.weight": table, "val_1": table.T.copy()},
        [LINEARS[0].replace("q", "head")],
        "emb.weight head.weight",
    )
    proto = onnx.load(model)
    proto.graph.node[0].metadata_props.add(key=SCOPES, value="['', 'emb', 'embedding']")
    onnx.save(proto, model)
    given, step = tmp_path / "w.safetensors", tmp_path / "step.onnx"

    def take(**values: Array) -> Array:
        safetensors.save_file({f"{n}.weight": v for n, v in values.items()}, given)
        grad(model, step, loss="mse", optimizer="sgd", weights=given)
        stored = {t.name: t for t in onnx.load(step).graph.initializer}
        return numpy_helper.to_array(stored["head.weight"])

    for values in ({"emb": other}, {"head": other}, {"emb": other, "head": other}):
        np.testing.assert_array_equal(take(**values), other)
    with pytest.raises(InputError, match=r"'head\.weight' and 'emb\.weight' differ in"):
        take(emb=other, head=table)
    trained(model, "data-parallel 2")
    export_weights(tmp_path / "c", tmp_path / "out")
    back = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == {"emb.weight", "head.weight"}
    np.testing.assert_array_equal(back["emb.weight"], back["head.weight"])


def test_a_model_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS / "gpt2.legacy.static.onnx"
    step = tmp_path / "step.onnx"
    options = ["--loss", "softmax-cross-entropy", "--optimizer", "adamw", "-o", str(step)]
    assert main(["grad", str(model), *options]) == 0
    assert "wte.weight (and onnx::MatMul_583)" in capsys.readouterr().err
    assert main(["check", str(step), "--devices", "2", "--for-any-host", "--train"]) == 0
