"""Calls of a session in any sequence, against the unsplit model under onnxruntime."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from onnxpar.api import shard
from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.runtime.session.session import InferenceSession

pytestmark = pytest.mark.usefixtures("medium")

STEPS = 300
"""Of each sequence; there is one for each medium."""
WORDS, WIDTH = 10, 8
OUTPUTS = ["y", "c2", "at", "d2"]
KEPT = {"c": "c2", "d": "d2"}
SHAPES = {"c": (4, 6), "d": (3, 2)}
CALLS = {"run": 8, "keep": 8, "read": 1, "write": 1, "reset": 0.3, "threads": 0.3, "bad": 0.6}
PAUSES = (0.0, 1e-5, 1e-4, 1e-3, 3e-3)
"""Seconds, from less than ranks look for a call to longer."""


def write(path: Path) -> None:
    """Numbers are small integers, so sums are exact in any order. Data decides the size of `at`,
    `c` is a maximum over the batch, and `d` only changes its sign."""
    draw = np.random.default_rng(0)

    def port(name: str, shape: Any, dtype: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, dtype, shape)

    def integers(name: str, *shape: int) -> Any:
        return numpy_helper.from_array(draw.integers(-2, 3, shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"]),
        helper.make_node("ReduceSum", ["e", "one"], ["sums"], keepdims=0),
        helper.make_node("MatMul", ["sums", "w1"], ["m1"]),
        helper.make_node("Relu", ["m1"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["m2"]),
        helper.make_node("Add", ["m2", "x"], ["y"]),
        helper.make_node("ReduceMax", ["y", "zero"], ["most"], keepdims=0),
        helper.make_node("Neg", ["c"], ["n"]),
        helper.make_node("Max", ["n", "most"], ["c2"]),
        helper.make_node("Neg", ["d"], ["d2"]),
        helper.make_node("Greater", ["y", "half"], ["is_more"]),
        helper.make_node("NonZero", ["is_more"], ["at"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            port("ids", ["b", "s"], TensorProto.INT64),
            port("x", ["b", 6]),
            *(port(name, shape) for name, shape in SHAPES.items()),
        ],
        [
            port("y", ["b", 6]),
            port("c2", SHAPES["c"]),
            port("at", [2, "k"], TensorProto.INT64),
            port("d2", SHAPES["d"]),
        ],
        [
            integers("table", WORDS, WIDTH),
            integers("w1", WIDTH, 12),
            integers("w2", 12, 6),
            numpy_helper.from_array(np.float32(0.5), "half"),
            numpy_helper.from_array(np.array([0]), "zero"),
            numpy_helper.from_array(np.array([1]), "one"),
        ],
    )
    opsets = [helper.make_opsetid("", 20)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


class Sequence:
    """Makes calls, and compares what they return."""

    def __init__(self, session: InferenceSession, path: Path, seed: int) -> None:
        self.session = session
        self.unsplit = ort.InferenceSession(path)
        self.choose = random.Random(seed)
        self.draw = np.random.default_rng(seed)
        self.call, self.sizes = "run", (1, 1)
        self.fetch: list[str] | None = None
        self.kept: dict[str, np.ndarray] = {}
        self.trail: list[object] = []

    def array(self, *shape: int) -> np.ndarray:
        return self.draw.integers(-9, 10, shape).astype(np.float32)

    def feeds(self) -> dict[str, np.ndarray]:
        """States that are kept are fed now and then."""
        b, s = self.sizes
        states = {
            name: self.array(*shape)
            for name, shape in SHAPES.items()
            if name not in self.kept or self.choose.random() < 0.1
        }
        return {"ids": self.draw.integers(0, WORDS, (b, s)), "x": self.array(b, 6)} | states

    def step(self) -> None:
        """One call, often of the same kind as the one before."""
        if self.choose.random() < 0.4:
            (self.call,) = self.choose.choices(list(CALLS), list(CALLS.values()))
            self.fetch = self.choose.choice([None, ["y"], ["c2", "y"], ["d2"], ["at", "c2"]])
            self.sizes = self.choose.choice([1, 2, 3, 5, 64]), self.choose.choice([1, 2])
        call, fetch, feeds = self.call, self.fetch, self.feeds()
        self.trail = [*self.trail[-9:], (call, self.sizes, fetch, sorted(feeds))]
        time.sleep(self.choose.choice(PAUSES))
        getattr(self, call)(feeds, fetch)

    def wanted(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values = self.unsplit.run(OUTPUTS, self.kept | feeds)
        return dict(zip(OUTPUTS, values, strict=True))

    def compare(self, found: object, wanted: object) -> None:
        np.testing.assert_array_equal(found, wanted, f"after {self.trail}")

    def run(self, feeds: dict[str, np.ndarray], fetch: list[str] | None) -> None:
        wanted = self.wanted(feeds)
        found = self.session.run(fetch, feeds)
        for name, value in zip(fetch or OUTPUTS, found, strict=True):
            self.compare(value, wanted[name])

    def keep(self, feeds: dict[str, np.ndarray], fetch: list[str] | None) -> None:
        wanted = self.wanted(feeds)
        found = self.session.run(fetch, feeds, keep_states=True)
        for name, value in zip(fetch or ["y", "at"], found, strict=True):
            self.compare(value, wanted[name])
        self.kept = {name: wanted[output] for name, output in KEPT.items()}

    def read(self, feeds: dict[str, np.ndarray], fetch: list[str] | None) -> None:
        for name, value in self.kept.items():
            self.compare(self.session.states.read(name), value)

    def write(self, feeds: dict[str, np.ndarray], fetch: list[str] | None) -> None:
        name = self.choose.choice(list(SHAPES))
        self.kept[name] = self.array(*SHAPES[name])
        self.session.states.write(name, self.kept[name])

    def reset(self, feeds: dict[str, np.ndarray], fetch: list[str] | None) -> None:
        self.session.states.reset()
        self.kept = {}

    def threads(self, feeds: dict[str, np.ndarray], fetch: list[str] | None) -> None:
        failed: list[BaseException] = []

        def body() -> None:
            try:
                self.run(feeds, fetch)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=body) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed

    def bad(self, feeds: dict[str, np.ndarray], fetch: list[str] | None) -> None:
        """An index out of range, which a rank finds, or a shape, which the session finds."""
        keep = self.choose.random() < 0.5
        if self.choose.random() < 0.5:
            feeds["ids"][-1, -1] = WORDS
            with pytest.raises(OnnxparError):
                self.session.run(None, feeds, keep_states=keep)
        else:
            with pytest.raises(InputError):
                self.session.run(fetch, feeds | {"x": feeds["x"][:, 1:]}, keep_states=keep)


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("preset", ["data-parallel", "tensor-parallel"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_calls_in_any_sequence(tmp_path: Path, ranks: int, preset: str) -> None:
    path, par = tmp_path / "m.onnx", tmp_path / "m.par"
    write(path)
    shard(path, par, devices=ranks, preset=preset, states=KEPT)
    with InferenceSession(par) as session:
        sequence = Sequence(session, path, ranks)
        for _ in range(STEPS):
            sequence.step()
