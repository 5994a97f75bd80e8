"""Ranks on OpenVINO's execution provider, against the unsplit model on the CPU's. tests/openvino.sh
runs them in an environment of their own."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from committed import MODELS
from onnx import TensorProto, helper, numpy_helper
from runtime.bundles import Tensor, all_reduce, write_par

from onnxpar.api import shard
from onnxpar.base.errors import RankError
from onnxpar.llm.generator import Generator
from onnxpar.runtime.ranks.groups import session_options, thread_worlds
from onnxpar.runtime.session.device import HOST
from onnxpar.runtime.session.openvino import PROVIDER, with_threads
from onnxpar.runtime.session.session import InferenceSession
from onnxpar.trainer.trainer import Trainer
from onnxpar.training import grad

PROVIDERS = [PROVIDER, HOST.provider]
needs_openvino = pytest.mark.skipif(
    PROVIDER not in ort.get_available_providers(), reason="needs onnxruntime-openvino"
)
pytestmark = pytest.mark.processes


def perceptron(folder: Path) -> Path:
    """Two layers of MatMul, Relu, MatMul and a residual, on any number of rows."""
    random, nodes, weights, last = np.random.default_rng(0), [], [], "x"
    for n in range(2):
        for name, shape in ((f"up{n}", (16, 64)), (f"down{n}", (64, 16))):
            array = random.standard_normal(shape).astype(np.float32) / 8
            weights.append(numpy_helper.from_array(array, name))
        nodes += [
            helper.make_node("MatMul", [last, f"up{n}"], [f"h{n}"]),
            helper.make_node("Relu", [f"h{n}"], [f"r{n}"]),
            helper.make_node("MatMul", [f"r{n}", f"down{n}"], [f"o{n}"]),
            helper.make_node("Add", [f"o{n}", last], [f"y{n}"]),
        ]
        last = f"y{n}"
    ports = [[helper.make_tensor_value_info(t, TensorProto.FLOAT, ["n", 16])] for t in ("x", last)]
    graph = helper.make_graph(nodes, "g", *ports, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def unsplit(model: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The results of the model on the CPU's provider."""
    return ort.InferenceSession(model, providers=[HOST.provider]).run(None, feeds)


def check(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@needs_openvino
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("preset", ["tensor-parallel", "data-parallel"])
def test_open_sizes(preset: str, ranks: int, tmp_path: Path) -> None:
    model = perceptron(tmp_path)
    shard(model, tmp_path / "m.par", devices=ranks, preset=preset)
    random = np.random.default_rng(1)
    with InferenceSession(tmp_path / "m.par", providers=PROVIDERS) as session:
        assert session.get_providers() == PROVIDERS
        for rows in (6, 6, 6, 4, 7, 6):
            feeds = {"x": random.standard_normal((rows, 16)).astype(np.float32)}
            check(session.run(None, feeds), unsplit(model, feeds))


@needs_openvino
@pytest.mark.parametrize("preset", ["tensor-parallel", "data-parallel"])
@pytest.mark.parametrize("name", ["gpt2.dynamo.dynamic", "llama.legacy.dynamic"])
def test_text_models(name: str, preset: str, tmp_path: Path) -> None:
    """Of these, ranks compute scalars from the open sizes."""
    model = MODELS / f"{name}.onnx"
    shard(model, tmp_path / "m.par", devices=2, preset=preset)
    with InferenceSession(tmp_path / "m.par", providers=PROVIDERS) as session:
        for shape in ((4, 12), (3, 7)):
            ids = np.random.default_rng(2).integers(0, 500, shape)
            known = {"input_ids": ids, "attention_mask": np.ones(shape, np.int64)}
            feeds = {port.name: known[port.name] for port in session.get_inputs()}
            check(session.run(None, feeds), unsplit(model, feeds))


@needs_openvino
def test_kept_states(tmp_path: Path) -> None:
    """s' = (s + x) / 2, split over ranks, and the sum of all elements over ranks."""

    def nodes(rank: int) -> list[onnx.NodeProto]:
        return [
            helper.make_node("Add", ["s", "x"], ["double"]),
            helper.make_node("Mul", ["double", "half"], ["t"]),
            helper.make_node("ReduceSum", ["t"], ["part"], keepdims=0),
            *all_reduce("part", "y"),
        ]

    split = [Tensor(name, (6,), ("tp",)) for name in ("x", "s", "t")]
    par = write_par(
        tmp_path,
        "tp=2",
        split[:2],
        [split[2], Tensor("y", ())],
        nodes,
        lambda rank: {"half": np.float32(0.5)},
        states={"s": "t"},
    )
    x, s = np.arange(6, dtype=np.float32), np.ones(6, np.float32)
    with InferenceSession(par, providers=PROVIDERS) as session:
        session.states.write("s", s)
        for _ in range(6):
            s = (s + x) / 2
            (y,) = session.run(["y"], {"x": x}, keep_states=True)
            np.testing.assert_allclose(y, s.sum(), rtol=1e-6)
        np.testing.assert_allclose(session.states.read("s"), s, rtol=1e-6)


@needs_openvino
@pytest.mark.parametrize("name", ["llama", "gpt2_optimum"])
def test_generated_tokens(name: str, tmp_path: Path) -> None:
    """A language model with caches, on both providers."""
    shard(MODELS / "llm" / name, tmp_path / "m.par", devices=2, preset="tensor-parallel")
    told = []
    for providers in (PROVIDERS, None):
        with Generator(tmp_path / "m.par", providers=providers) as generator:
            told.append(generator.generate([[5, 6, 7, 8], [9, 3]], max_new_tokens=12))
    assert [c.tokens for c in told[0]] == [c.tokens for c in told[1]]


@needs_openvino
def test_training(tmp_path: Path) -> None:
    """The loss is a scalar that ranks reduce, and of which more is computed."""
    batch = {
        "pixel_values": np.random.default_rng(3).standard_normal((4, 3, 64, 64)).astype(np.float32),
        "labels": np.array([1, 0, 1, 1]),
    }
    grad(
        MODELS / "resnet.legacy.training.onnx",
        tmp_path / "m.onnx",
        loss="softmax-cross-entropy",
        optimizer="adamw",
    )
    shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=2, preset="data-parallel")
    losses = []
    for providers in (PROVIDERS, None):
        with Trainer(tmp_path / "m.par", providers=providers) as trainer:
            losses.append([trainer.step(batch, rate=1e-3)[trainer.spec.loss] for _ in range(4)])
    np.testing.assert_allclose(*losses, rtol=1e-4)


@needs_openvino
def test_who_computes_what(tmp_path: Path) -> None:
    """OpenVINO has all nodes but the collectives, of which each reads a result of the last: in this
    order they run, however the graph is cut between them."""
    shard(perceptron(tmp_path), tmp_path / "m.par", devices=2, preset="tensor-parallel")
    file = tmp_path / "m.par" / "rank_0000.onnx"
    worlds = thread_worlds(2)
    options = session_options(worlds[0])
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(file, options, providers=PROVIDERS)
    parts = [(p.ep_name, p.get_nodes()) for p in session.get_provider_graph_assignment_info()]
    ours = [node for node in onnx.load(file).graph.node if node.domain == "onnxpar"]
    assert {n.name for ep, nodes in parts for n in nodes if ep == HOST.provider} == {
        node.name for node in ours
    }
    assert [len(nodes) for ep, nodes in parts if ep == PROVIDER] == [3, 4, 1]
    for before, after in itertools.pairwise(ours):
        assert before.output[-1] in after.input
    del session
    for world in worlds:
        world.close()


@needs_openvino
def test_profile(tmp_path: Path) -> None:
    """onnxruntime writes no optimized graph here; the trace has the parts that are compiled."""
    model, feeds = perceptron(tmp_path), {"x": np.ones((4, 16), np.float32)}
    shard(model, tmp_path / "m.par", devices=2, preset="tensor-parallel")
    with InferenceSession(tmp_path / "m.par", providers=PROVIDERS, profile=True) as session:
        check(session.run(None, feeds), unsplit(model, feeds))
        session.end_profile(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert sum("OpenVINO" in name for name in names) == 2 * 3
    assert sum("AllReduce" in name for name in names) >= 2 * 2


@needs_openvino
def test_a_graph_cut_in_a_circle(tmp_path: Path) -> None:
    """onnxruntime-openvino 1.24 joins a lone node to a later part that reads it, also where that
    part waits for a collective of the lone node: ranks refuse that, or compute, and never wait."""

    def nodes(rank: int) -> list[onnx.NodeProto]:
        return [
            helper.make_node("Relu", ["x"], ["a"]),
            *all_reduce("a", "b"),
            helper.make_node("Tanh", ["b"], ["c"]),
            helper.make_node("Sigmoid", ["x"], ["d"]),
            helper.make_node("Mul", ["a", "d"], ["e"]),
            *all_reduce("e", "f", tag=2),
            helper.make_node("Tanh", ["f"], ["g"]),
            helper.make_node("Add", ["c", "d"], ["h"]),
            helper.make_node("Add", ["g", "h"], ["y"]),
        ]

    par = write_par(tmp_path, "tp=2", [Tensor("x", (4,))], [Tensor("y", (4,))], nodes)
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    a, d = np.maximum(x, 0), 1 / (1 + np.exp(-x))
    try:
        session = InferenceSession(par, providers=PROVIDERS)
    except RankError as error:
        assert re.search("not acyclic.*another preset, or leave this provider out", str(error))
        return
    with session:
        check(session.run(None, {"x": x}), [np.tanh(2 * a * d) + np.tanh(2 * a) + d])


def test_threads() -> None:
    both = with_threads([PROVIDER, HOST.provider], 3)
    assert both == [(PROVIDER, {"num_of_threads": "3"}), HOST.provider]
    own = {"num_of_threads": "1", "precision": "FP32"}
    assert with_threads([(PROVIDER, own)], 3) == [(PROVIDER, own)]
