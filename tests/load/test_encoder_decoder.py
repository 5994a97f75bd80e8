"""An encoder-decoder taken apart computes what its files compute together."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from committed import MODELS

import onnxpar
from onnxpar.base.errors import ModelError
from onnxpar.graph.model_folder import encoder_decoder_in, encoder_file
from onnxpar.load.encoder_decoder import DECODER, ENCODER, read_part

FOLDERS = [MODELS / "llm" / name for name in ("t5", "bart", "whisper")]
Array = np.ndarray[Any, Any]


def part(folder: Path, name: str) -> tuple[onnx.ModelProto, list[tuple[str, str]]]:
    files = encoder_decoder_in(folder)
    assert files is not None
    path = files.later if name == DECODER else encoder_file(files.later)
    return read_part(onnx.load(path, load_external_data=False), name, path)


def run(model: onnx.ModelProto | Path, feeds: dict[str, Array]) -> dict[str, Array]:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    ports = {p.name: p for p in session.get_inputs()}
    given = {
        n: a.astype(np.float32 if "float" in ports[n].type else a.dtype)
        for n, a in feeds.items()
        if n in ports
    }
    names = [p.name for p in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def prompts(folder: Path) -> dict[str, Array]:
    """Two prompts, of which the second one is shorter, if prompts have lengths."""
    random = np.random.default_rng(0)
    if folder.name == "whisper":
        return {"input_features": random.standard_normal((2, 80, 200))}
    mask = np.array([[1] * 7, [1] * 4 + [0] * 3])
    return {"input_ids": random.integers(3, 320, (2, 7)), "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_parts_are_the_whole(folder: Path) -> None:
    """The first decoder on several tokens, against the later one on each of them."""
    given, tokens = prompts(folder), np.array([[2, 17, 40], [2, 99, 5]])
    caches = run(part(folder, ENCODER)[0], given)
    decoder, pairs = part(folder, DECODER)
    assert set(caches) == {before for before, _ in pairs} and len(pairs) == 4
    past = [p.name for p in decoder.graph.input if p.name.startswith("past_key_values")]
    kept = {n: caches.get(n, np.zeros((2, 4, 0, 8), np.float32)) for n in past}
    logits = []
    for step in range(3):
        feeds = {"input_ids": tokens[:, step : step + 1], **kept}
        if "attention_mask" in given:
            feeds["encoder_attention_mask"] = given["attention_mask"]
        found = run(decoder, feeds)
        for before, after in pairs:
            np.testing.assert_array_equal(found[after], caches[before])
        kept = {n: found[n.replace("past_key_values", "present")] for n in past}
        logits.append(found["logits"][:, 0])
    files = encoder_decoder_in(folder)
    assert files is not None
    hidden = run(files.encoder, given)["last_hidden_state"]
    empty = {n: np.zeros((2, 4, 0, 8), np.float32) for n in past}
    whole = run(
        files.first,
        {
            "input_ids": tokens,
            "encoder_hidden_states": hidden,
            "encoder_attention_mask": given.get("attention_mask", tokens),
            "use_cache_branch": np.array([False]),
            **empty,
        },
    )
    np.testing.assert_allclose(np.stack(logits, 1), whole["logits"], rtol=1e-4, atol=1e-4)
    for before, after in pairs:
        np.testing.assert_allclose(caches[before], whole[after], rtol=1e-4, atol=1e-5)


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to / folder.name)
    return to / folder.name


def change(file: Path, **opsets: int) -> onnx.ModelProto:
    model = onnx.load(file)
    for opset in model.opset_import:
        opset.version = opsets.get("opset", opset.version)
    return model


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    folder = copy(FOLDERS[0], tmp_path)
    onnx.save(change(folder / "decoder_model.onnx", opset=17), folder / "decoder_model.onnx")
    with pytest.raises(ModelError, match=r"has opset 18, and .*decoder_model.onnx 17; export both"):
        part(folder, ENCODER)
    shutil.copy(FOLDERS[0] / "encoder_model.onnx", folder / "decoder_model.onnx")
    with pytest.raises(ModelError, match="are no encoder and decoder of one model"):
        part(folder, ENCODER)
    shutil.copy(FOLDERS[0] / "decoder_model.onnx", folder / "decoder_with_past_model.onnx")
    with pytest.raises(ModelError, match=r"no inputs past_key_values.N.encoder.key"):
        part(folder, DECODER)
    with pytest.raises(ModelError, match="holds no encoder-decoder"):
        path = MODELS / "llm" / "llama" / "model.onnx"
        read_part(onnx.load(path, load_external_data=False), DECODER, path)


def test_branches_whose_names_are_taken(tmp_path: Path) -> None:
    folder = copy(FOLDERS[1], tmp_path)
    file = folder / "decoder_model_merged.onnx"
    model = onnx.load(file)
    inner = next(a.g for n in model.graph.node for a in n.attribute if a.name == "then_branch")
    inner.node[0].output[0] = model.graph.initializer[0].name
    onnx.save(model, file)
    with pytest.raises(ModelError, match="cannot take the branches of 'use_cache_branch' apart"):
        part(folder, DECODER)


def test_weights_in_other_files(tmp_path: Path) -> None:
    """The encoder and the decoder may have their weights in files of the folder."""
    folder = copy(FOLDERS[0], tmp_path)
    for file in folder.glob("*.onnx"):
        model = onnx.load(file)
        onnx.save(
            model,
            file,
            save_as_external_data=True,
            location=f"{file.name}_data",
            size_threshold=256,
        )
    found, _ = part(folder, ENCODER)
    onnx.save(found, folder / "made.onnx")
    given = prompts(folder)
    wanted = run(part(FOLDERS[0], ENCODER)[0], given)
    for name, value in run(folder / "made.onnx", given).items():
        np.testing.assert_array_equal(value, wanted[name])


def test_sizes_that_are_taken_of_the_encoders_result(tmp_path: Path) -> None:
    """Earlier exporters take the number of the encoder's tokens from its result in every step."""
    folder = copy(FOLDERS[0], tmp_path)
    file = folder / "decoder_with_past_model.onnx"
    model = onnx.load(file)
    graph = model.graph
    hidden = onnx.helper.make_tensor_value_info("encoder_hidden_states", 1, ["b", "s", 32])
    graph.input.append(hidden)
    (reader,) = [n for n in graph.node if n.input[:1] == ["encoder_attention_mask"]][:1]
    reader.input[0] = "mask::same"
    graph.node.insert(
        0, onnx.helper.make_node("Expand", ["encoder_attention_mask", "two"], ["mask::same"])
    )
    graph.node.insert(0, onnx.helper.make_node("Shape", ["encoder_hidden_states"], ["two"], end=2))
    onnx.save(model, file)
    found, _ = part(folder, DECODER)
    assert "encoder_hidden_states" not in [port.name for port in found.graph.input]
    past = [p.name for p in found.graph.input if p.name.startswith("past_key_values")]
    given = {n: np.ones((2, 4, 7 if ".encoder." in n else 3, 8), np.float32) for n in past}
    given |= {"input_ids": np.array([[5], [6]]), "encoder_attention_mask": np.ones((2, 7), int)}
    wanted = run(part(FOLDERS[0], DECODER)[0], given)
    np.testing.assert_array_equal(run(found, given)["logits"], wanted["logits"])
    graph.node.insert(2, onnx.helper.make_node("Abs", ["encoder_hidden_states"], ["more"]))
    graph.output.append(onnx.helper.make_tensor_value_info("more", 1, None))
    onnx.save(model, file)
    with pytest.raises(ModelError, match="reads 'encoder_hidden_states' in every step"):
        part(folder, DECODER)


@pytest.mark.slow
def test_projections_that_depend_on_the_decoders_tokens(tmp_path: Path) -> None:
    folder = copy(FOLDERS[0], tmp_path)
    file = folder / "decoder_model.onnx"
    model = onnx.load(file)
    graph = model.graph
    (maker,) = [n for n in graph.node if list(n.output) == ["present.0.encoder.key"]]
    maker.output[0] = "key"
    for node in graph.node:
        node.input[:] = ["key" if n == "present.0.encoder.key" else n for n in node.input]
    more = [
        onnx.helper.make_node("Cast", ["input_ids"], ["as_float"], to=1),
        onnx.helper.make_node("ReduceMean", ["as_float"], ["mean"], keepdims=0),
        onnx.helper.make_node("Add", ["key", "mean"], ["present.0.encoder.key"]),
    ]
    graph.node.extend(more)
    onnx.save(model, file)
    with pytest.raises(
        ModelError, match=r"do not follow from the encoder's result alone: Cast .*'input_ids'"
    ):
        onnxpar.shard(folder, tmp_path / "t5.par", devices=1)
