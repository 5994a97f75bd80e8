"""Several runs in a call: outputs of each are inputs of the next, on the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, helper
from runtime.bundles import Tensor, all_reduce, write_par

from onnxpar.base.errors import InputError
from onnxpar.runtime.ranks.processes import Processes
from onnxpar.runtime.session.session import InferenceSession
from onnxpar.runtime.session.threads import ThreadSession

pytestmark = pytest.mark.processes

WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)
X = np.array([[1, 2, 3, 4]], np.float32)
B = np.zeros(4, np.float32)


def write(folder: Path) -> Path:
    """z = (x + b) W, of which each rank has three columns; and the sum of x / 2 over ranks, plus
    1."""

    def nodes(rank: int) -> Sequence[NodeProto]:
        return [
            helper.make_node("Add", ["x", "b"], ["shifted"]),
            helper.make_node("MatMul", ["shifted", "W"], ["z"]),
            helper.make_node("Mul", ["x", "half"], ["part"]),
            *all_reduce("part", "whole"),
            helper.make_node("Add", ["whole", "one"], ["next"]),
            helper.make_node("Cast", ["next"], ["next64"], to=11),
        ]

    def weights(rank: int) -> Mapping[str, np.ndarray]:
        found = {"half": np.float32(0.5), "one": np.float32(1)}
        return {n: np.asarray(a) for n, a in found.items()} | {"W": WEIGHT[:, 3 * rank :][:, :3]}

    outputs = [
        Tensor("z", (1, 6), (None, "tp")),
        Tensor("next", (1, 4)),
        Tensor("next64", (1, 4), None, "float64"),
    ]
    return write_par(
        folder, "tp=2", [Tensor("x", (1, 4)), Tensor("b", (4,))], outputs, nodes, weights
    )


@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("kind", [InferenceSession, ThreadSession])
def test_runs_follow_each_other(kind: type[InferenceSession], tmp_path: Path) -> None:
    with kind(write(tmp_path)) as session:
        for number, times in enumerate((3, 3, 3, 1, 5, 5, 2, 2)):
            x = X * number
            steps = session.run_steps(["z", "next"], {"x": x, "b": B}, {"x": "next"}, times)
            assert len(steps) == times
            for k, (z, after) in enumerate(steps):
                np.testing.assert_array_equal(z, (x + k) @ WEIGHT)
                np.testing.assert_array_equal(after, x + k + 1)
            np.testing.assert_array_equal(x, X * number)
            if number % 2:
                np.testing.assert_array_equal(session.run(["z"], {"x": x, "b": B})[0], x @ WEIGHT)


def test_as_many_again_send_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    call = Processes.call

    def noted(self: Processes, messages: list[object] | None, what: str) -> object:
        found.extend([what] * (messages is not None))
        return call(self, messages, what)

    monkeypatch.setattr(Processes, "call", noted)
    with InferenceSession(write(tmp_path)) as session:
        for number, times in enumerate((3, 3, 3, 4, 4)):
            (*_, (z,)) = session.run_steps(["z"], {"x": X + number, "b": B}, {"x": "next"}, times)
            np.testing.assert_array_equal(z, (X + number + times - 1) @ WEIGHT)
    assert found == ["the start", "run 1", "run 4"]


def test_inputs_in_other_memory(tmp_path: Path) -> None:
    """Inputs that ranks read where the caller writes them, in several places."""
    with InferenceSession(write(tmp_path)) as session:
        shifts = [session._ranks.memory(B.dtype, B.shape) for _ in range(3)]
        for number, times in enumerate((4, 4, 3, 2, 4, 4)):
            b = shifts[number % 3]
            b[:] = number
            steps = session.run_steps(["z"], {"x": X, "b": b}, {"x": "next"}, times)
            for k, (z,) in enumerate(steps):
                np.testing.assert_array_equal(z, (X + k + number) @ WEIGHT)


@pytest.mark.parametrize(
    "carried,times,named",
    [
        ({"x": "next"}, 0, "times is 0"),
        ({}, 2, "carried {}"),
        ({"x": "gone"}, 2, "'gone' cannot be carried to 'x'"),
        ({"y": "next"}, 2, "'next' cannot be carried to 'y'"),
        ({"x": "z"}, 2, "'z' or 'x' is split over ranks"),
        ({"x": "next64"}, 2, r"'next64' is float64\[1, 4\], and 'x' is float32\[1, 4\]"),
    ],
)
def test_what_cannot_be_carried_is_refused(
    carried: dict[str, str], times: int, named: str, tmp_path: Path
) -> None:
    with ThreadSession(write(tmp_path)) as session:
        with pytest.raises(InputError, match=named):
            session.run_steps(["z"], {"x": X, "b": B}, carried, times)
        np.testing.assert_array_equal(session.run(["z"], {"x": X, "b": B})[0], X @ WEIGHT)


def test_states_that_are_copied_are_refused(tmp_path: Path) -> None:
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("x", (3,)), Tensor("s", (3,))],
        [Tensor("t", (3,)), Tensor("y", (3,))],
        lambda rank: [
            helper.make_node("Add", ["s", "x"], ["t"]),
            helper.make_node("Neg", ["x"], ["y"]),
        ],
        states={"s": "t"},
    )
    x = np.ones(3, np.float32)
    refused = pytest.raises(InputError, match="state 's' is not changed in place")
    with ThreadSession(par) as session, refused:
        session.run_steps(["y"], {"x": x, "s": x}, {"x": "y"}, 2)


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("kind", [InferenceSession, ThreadSession])
def test_states_written_between(kind: type[InferenceSession], tmp_path: Path) -> None:
    """s' = s + x, x' = x, z = -x: runs read the memory of a state that a write or a clear
    replaces."""
    par = write_par(
        tmp_path,
        "tp=2",
        [Tensor("x", (4,)), Tensor("s", (4,))],
        [Tensor("t", (4,)), Tensor("y", (4,)), Tensor("z", (4,))],
        lambda rank: [
            helper.make_node("Add", ["s", "x"], ["t"]),
            helper.make_node("Identity", ["x"], ["y"]),
            helper.make_node("Neg", ["x"], ["z"]),
        ],
        states={"s": "t"},
        in_place={"s"},
    )
    ones = np.ones(4, np.float32)
    with kind(par) as session:
        x = session._ranks.memory(ones.dtype, ones.shape)
        x[:] = ones
        for start in (5, 0, 7):
            if start:
                session.states.write("s", start * ones)
            else:
                session.states.clear({"s": (4,)})
            session.run_steps(["z"], {"x": x}, {"x": "y"}, 3)
            np.testing.assert_array_equal(session.states.read("s"), (start + 3) * ones)


SCRIPT = """
import sys
import numpy as np
from onnxpar.runtime.session.session import InferenceSession
with InferenceSession(sys.argv[1], timeout=30) as session:
    x = np.load(sys.argv[2])
    for times in (3, 3, 1):
        feeds = {"x": x, "b": np.zeros(4, np.float32)}
        steps = session.run_steps(["z", "next"], feeds, {"x": "next"}, times)
        print([[a.tolist() for a in step] for step in steps])
"""


@pytest.mark.slow
def test_under_a_launcher(tmp_path: Path) -> None:
    """Each process gets the global outputs of each run."""
    par, script = write(tmp_path), tmp_path / "script.py"
    script.write_text(SCRIPT)
    np.save(tmp_path / "x.npy", X)
    common = {"ONNXPAR_WORLD_SIZE": "2", "ONNXPAR_STORE": f"file:{tmp_path}/store"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, par, tmp_path / "x.npy"],
            env={**os.environ, **common, "ONNXPAR_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    wanted = [[((X + k) @ WEIGHT).tolist(), (X + k + 1).tolist()] for k in range(3)]
    assert told[0] == told[1] == [str(wanted), str(wanted), str(wanted[:1])]
