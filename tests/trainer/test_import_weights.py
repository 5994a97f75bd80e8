"""A step takes the values of safetensors files, by the names that weights have in torch."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from committed import MODELS
from onnx import numpy_helper
from training.steps import MLP, Array, ThreadTrainer, shard, write_model

from onnxpar.base.errors import InputError
from onnxpar.cli.command_line import main
from onnxpar.graph.training_spec import Step
from onnxpar.trainer.checkpoint import Progress
from onnxpar.trainer.export_weights import export_weights
from onnxpar.training import grad

save = pytest.importorskip("safetensors.numpy").save_file
LLAMA = MODELS / "llama.dynamo.static.onnx"
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEARS = (*PARTS, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def defaults(step: Path) -> dict[str, Array]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(step).graph.initializer}


def of_llama() -> dict[str, Array]:
    """Weights of a Llama of its sizes, as Hugging Face names and stores them: [out, in]."""
    draw = np.random.default_rng(4).standard_normal
    sizes = {"q_proj": (48, 48), "k_proj": (24, 48), "v_proj": (24, 48), "o_proj": (48, 48)}
    sizes |= {"gate_proj": (144, 48), "up_proj": (144, 48), "down_proj": (48, 144)}
    model = {t.name: list(t.dims) for t in onnx.load(LLAMA).graph.initializer}
    wanted = {name: tuple(model[name]) for name in model if name.endswith(".weight")}
    for layer in (0, 1):
        for part in LINEARS:
            wanted[f"model.layers.{layer}.{part}.weight"] = sizes[part.rpartition(".")[2]]
    wanted["lm_head.weight"] = (512, 48)
    return {name: draw(size).astype(np.float32) for name, size in wanted.items()}


@pytest.mark.parametrize(
    ("further", "dtype"), [("", np.float32), ("wrapped.inner.", ml_dtypes.bfloat16)]
)
def test_weights_that_an_exporter_renamed_and_transposed(
    further: str, dtype: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In two files with an index; in either type, and under the names of a wrapper."""
    given = {further + n: v.astype(dtype) for n, v in of_llama().items()}
    names = sorted(given)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save({name: given[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    step = tmp_path / "step.onnx"
    options = ["--loss", "mse", "--optimizer", "sgd", "--weights", str(tmp_path)]
    assert main(["grad", str(LLAMA), *options, "-o", str(step)]) == 0
    assert "lacks" not in capsys.readouterr().err
    spec, found = Step.of(onnx.load(step)), defaults(step)
    assert spec is not None
    seen = set()
    for slot in spec.parameters:
        name = further + (slot.torch or [slot.input])[0]
        wanted = given[name].astype(np.float32)
        np.testing.assert_array_equal(found[slot.input], wanted.T if slot.transposed else wanted)
        seen.add(name)
    assert seen >= {f"{further}model.layers.1.{part}.weight" for part in LINEARS}
    with ThreadTrainer(shard(step, "tensor-parallel 2")[0]) as trainer:
        trainer.save(tmp_path / "c", Progress(1))
    export_weights(tmp_path / "c", tmp_path / "w")
    back = pytest.importorskip("safetensors.numpy").load_file(tmp_path / "w" / "model.safetensors")
    for name, value in back.items():
        np.testing.assert_array_equal(value, given[further + name].astype(np.float32), name)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    model = write_model(MLP, tmp_path)
    save({"w1": np.ones((6, 9), np.float32), "v": np.ones(3)}, tmp_path / "w.safetensors")
    with pytest.warns() as told:
        grad(
            model,
            tmp_path / "step.onnx",
            loss="mse",
            optimizer="sgd",
            weights=tmp_path / "w.safetensors",
        )
    texts = [str(each.message) for each in told]
    assert any("lacks 3 of 4 weights of the step, which keep" in text for text in texts)
    assert any("the step has no weight for 1 tensors of" in text for text in texts)
    before, after = defaults(model), defaults(tmp_path / "step.onnx")
    assert (after["w1"] == 1).all()
    for name in ("w2", "w3", "w4"):
        np.testing.assert_array_equal(after[name], before[name])


def test_bad_files(tmp_path: Path) -> None:
    model, file = write_model(MLP, tmp_path), tmp_path / "w.safetensors"

    def message(place: Path = file) -> str:
        with pytest.raises(InputError) as raised:
            grad(model, tmp_path / "s.onnx", loss="mse", optimizer="sgd", weights=place)
        assert not (tmp_path / "s.onnx").exists()
        return str(raised.value)

    save({"w1": np.ones((9, 6), np.float32)}, file)
    assert "'w1' in" in message() and "has the shape [9, 6], but the model's 'w1'" in message()
    save({"encoder.v": np.ones(3)}, file)
    assert "none of its 1 tensors, such as 'encoder.v', has the name of a weight" in message()
    file.write_bytes(b"not safetensors")
    assert f"--weights: cannot read {file}" in message()
    assert "no such file or folder" in message(tmp_path / "none")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "cannot read" in message(tmp_path)
