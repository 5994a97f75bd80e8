"""Warnings of what an exporter has done to a network before it is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from committed import MODELS
from training.steps import write_model

import onnxpar.training.gradients  # noqa: F401  (registers the rules)
from onnxpar.load.load import load
from onnxpar.load.loading import LoadRequest
from onnxpar.training.batch_norm import BatchNorm
from onnxpar.training.cautions import (
    cautions_of,
    cautions_of_batch_norm,
    cautions_of_probabilities,
)
from onnxpar.training.gradients.trained import find_trained

EXPORTED = "pkg.torch.export.ExportedProgram.graph_signature"


@pytest.mark.parametrize("export", ["dynamo.static", "legacy.static"])
def test_a_folded_batch_norm_is_told_of(export: str) -> None:
    model = load(MODELS / f"resnet.{export}.onnx", LoadRequest(for_training=True))
    (told,) = cautions_of_batch_norm(model, BatchNorm())
    assert " and 26 more: a batch-norm was folded into the weights" in told
    assert "had Dropout, the export has removed it" in told and "optimize=False" in told


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", ["resnet.legacy.training", "gpt2.dynamo.static", "unet.legacy.static"]
)
def test_other_exports_are_not(name: str) -> None:
    """With batch-norm as it was, and networks of convolutions that have none."""
    model = load(MODELS / f"{name}.onnx", LoadRequest(for_training=True))
    assert list(cautions_of_batch_norm(model, BatchNorm())) == []


def test_a_batch_norm_for_inference_is_told_of(tmp_path: Path) -> None:
    text = """m (float[2,3,4] x, float[3] w1, float[3] w2, float[3] w3, float[3] w4)
    => (float[2,3,4] y) { y = BatchNormalization(x, w1, w2, w3, w4) }"""
    model = load(write_model(text, tmp_path), LoadRequest(for_training=True))
    (told,) = cautions_of_batch_norm(model, BatchNorm())
    assert "never updates them; --batch-norm global" in told
    assert list(cautions_of_batch_norm(model, BatchNorm("global"))) == []


def test_what_the_exporter_has_computed_from_parameters_is_told_of(tmp_path: Path) -> None:
    """A normalized weight that was folded would be trained without its normalization; one that was
    transposed is trained as it was."""
    text = """m (float[4,6] x, float[6,3] w1, float[3,5] w2) => (float[4,5] y)
    { h = MatMul(x, w1)  y = MatMul(h, w2) }"""
    path = write_model(text, tmp_path)
    proto = onnx.load(path)
    signature = "p_a: PARAMETER target='a.weight'\np_b: PARAMETER target='b.weight'\n"
    proto.graph.metadata_props.add(key=EXPORTED, value=signature)
    for name, new in (("w1", "val_3"), ("w2", "div_1")):
        tensor = next(t for t in proto.graph.initializer if t.name == name)
        tensor.name = new
        for node in proto.graph.node:
            node.input[:] = [new if n == name else n for n in node.input]
    onnx.save(proto, path)
    model = load(path, LoadRequest(for_training=True))
    weights = find_trained(model)
    assert [t.name for t in weights.trained] == ["val_3", "div_1"]
    (told,) = cautions_of(model, weights)
    assert told.startswith("div_1: the exporter computed these from parameters")
    assert "a.weight, b.weight" in told and "val_3" not in told


@pytest.mark.parametrize("by", ["row", "pair", "none", "one value"])
def test_a_parameter_whose_rows_the_exporter_repeated_is_told_of(by: str, tmp_path: Path) -> None:
    """One row of a table of token types for all tokens; a bias by distance, for pairs of tokens."""
    text = """m (float[2,5,5,4] x, float[1,5,5,4] w1) => (float[2,5,5,4] y) { y = Add(x, w1) }"""
    path = write_model(text, tmp_path)
    proto = onnx.load(path)
    apart = np.abs(np.arange(5) - np.arange(5)[:, None])[None, ..., None]
    value = {
        "row": np.broadcast_to(np.arange(4), (1, 5, 5, 4)),
        "pair": (apart + np.array([2, 9, 16, 25])) ** 2,
        "none": np.arange(100).reshape(1, 5, 5, 4),
        "one value": np.full((1, 5, 5, 4), 0.1),
    }[by]
    value = np.sqrt(value + 0.1).astype(np.float32)
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(value, "embedding_1"))
    proto.graph.node[0].input[1] = "embedding_1"
    signature = "p_a: PARAMETER target='a.weight'\n"
    proto.graph.metadata_props.add(key=EXPORTED, value=signature)
    onnx.save(proto, path)
    model = load(path, LoadRequest(for_training=True))
    told = [text for text in cautions_of(model, find_trained(model)) if "repeated rows" in text]
    assert [text.partition(":")[0] for text in told] == ["embedding_1"] * (by in ("row", "pair"))


def test_a_fresh_network_is_told_of(tmp_path: Path) -> None:
    text = """m (float[4,6] x, float[6] w1, float[6] w2) => (float[4,6] y)
    { a = LayerNormalization(x, w1, w2)  r = Relu(a)  y = LayerNormalization(r, w1) }"""
    model = load(write_model(text, tmp_path), LoadRequest(for_training=True))
    (told,) = cautions_of(model, find_trained(model))
    assert told.startswith("w1 (read by 2 nodes): several nodes read the same tensor")
    assert model.shared == {"w1": 2}
    assert np.prod(find_trained(model).trained[0].tensor.shape) == 6


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        ("s = Sigmoid(x)  y = Identity(s)", ""),
        ("y = Relu(x)", ""),
        ("[n] y = HardSigmoid(x)", "as probabilities: HardSigmoid 'n' makes numbers from 0 to 1"),
        ("s = Sigmoid(x)  [n] y = Add(s, s)", "as scores before a sigmoid, but Add 'n' reads"),
    ],
)
def test_what_bce_takes_an_output_for(tail: str, told: str, tmp_path: Path) -> None:
    text = f"m (float[2,3] x) => (float[2,3] y) {{ {tail} }}"
    graph = load(write_model(text, tmp_path), LoadRequest(for_training=True)).graph
    found = list(cautions_of_probabilities(graph, "bce", None))
    assert [told in each for each in found] == [True] * bool(told)
    assert not list(cautions_of_probabilities(graph, "mse", None))
