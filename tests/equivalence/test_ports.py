"""Rank files of others: ports.json, their own names and collectives, and files that are wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from equivalence.hand_split import parsed, verified, weights
from onnx import helper, numpy_helper

import onnxpar
from onnxpar.cli.command_line import main

W = weights(up=(8, 16), down=(16, 6))
MODEL = "g (float[4,8] x) => (float[4,6] y) { h = MatMul(x, up) r = Relu(h) y = MatMul(r, down) }"
RANK = """g (float[4,8] x) => (float[4,6] y) {
    h = MatMul(x, up) r = Relu(h) p = MatMul(r, down) y = AllReduce(p) }"""
TP: dict[str, Any] = {"mesh": {"tp": 2}}


def part(rank: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    at = slice(8 * rank, 8 * rank + 8)
    return {"up": W["up"][:, at], "down": W["down"][at], **more}


def test_names_of_ranks_are_their_own(tmp_path: Path) -> None:
    """Tensors have other names than in the model, and others on each rank."""
    names = ("h", "r", "p", "up", "down")
    ranks = []
    for rank in range(2):
        text = RANK
        for name in names:
            text = text.replace(f" {name} ", f" {name}_{rank} ").replace(
                f"({name})", f"({name}_{rank})").replace(f", {name})", f", {name}_{rank})").replace(
                f"({name},", f"({name}_{rank},")  # fmt: skip
        ranks.append((text, {f"{name}_{rank}": value for name, value in part(rank).items()}))
    result = verified(tmp_path, (MODEL, W), ranks, TP)
    assert result.ok and result.proved["lemma"] == 3, result.text()


def test_ranks_cut_whole_weights_themselves(tmp_path: Path) -> None:
    """Also weights that are too large to fold, and values of Constant nodes."""
    large = weights(up=(8, 1 << 18), down=(1 << 18, 6))
    half = 1 << 17
    text = """g (float[4,8] x) => (float[4,6] y) {
        zero = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>()
        u = Slice(up, start, stop, one) d = Slice(down, start, stop, zero)
        h = MatMul(x, u) r = Relu(h) p = MatMul(r, d) y = AllReduce(p) }"""
    ranks = [
        (text, {**large, "start": np.array([half * r]), "stop": np.array([half * r + half])})
        for r in range(2)
    ]
    result = verified(tmp_path / "right", (MODEL, large), ranks, TP)
    assert result.ok and result.proved["lemma"] == 3, result.text()
    ranks[1][1]["stop"] = ranks[1][1]["stop"] - 1
    assert not verified(tmp_path / "wrong", (MODEL, large), ranks, TP).ok


def test_two_meshes_of_a_weight(tmp_path: Path) -> None:
    """A weight that is cut in both dimensions, of a mesh of two axes."""
    model = "g (float[4,8] x) => (float[4,6] y) { y = MatMul(x, w) }"
    w = weights(w=(8, 6))
    ranks = []
    for rank in range(4):
        a, b = divmod(rank, 2)
        group = "0,2" if b == 0 else "1,3"
        text = f"""g (float[4,4] x) => (float[4,3] y) {{
            p = MatMul(x, w) y = AllReduce[{group}](p) }}"""
        ranks.append((text, {"w": w["w"][4 * a : 4 * a + 4, 3 * b : 3 * b + 3]}))
    ports = {"mesh": {"a": 2, "b": 2}, "inputs": {"x": {"1": "a"}}, "outputs": {"y": {"-1": "b"}}}
    result = verified(tmp_path, (model, w), ranks, ports)
    assert result.ok, result.text()


def test_uneven_and_interleaved_parts(tmp_path: Path) -> None:
    model = "g (float[6,5] x) => (float[6,5] y) { y = Exp(x) }"
    ranks = [(f"g (float[3,{n}] x) => (float[3,{n}] y) {{ y = Exp(x) }}", {}) for n in (5, 5)]
    even = {"0": [[[0, 1], [2, 3], [4, 5]], [[1, 2], [3, 4], [5, 6]]]}
    ports = TP | {"inputs": {"x": even}, "outputs": {"y": even}}
    assert verified(tmp_path / "a", (model, {}), ranks, ports).ok
    other = {"0": [[0, 3], [3, 6]]}
    assert not verified(tmp_path / "b", (model, {}), ranks, ports | {"outputs": {"y": other}}).ok
    missing = {"0": [[0, 3], [0, 3]]}
    result = verified(
        tmp_path / "c",
        (model, {}),
        ranks,
        TP | {"inputs": {"x": missing}, "outputs": {"y": missing}},
    )
    assert "no rank has some of its elements" in result.text()


def test_open_sizes_and_files(tmp_path: Path) -> None:
    model = "g (float[batch,8] x) => (float[batch,8] y) { y = Exp(x) }"
    rank = ("g (float[n,8] x) => (float[n,8] y) { y = Exp(x) }", {})
    ports = TP | {"inputs": {"x": {"0": "tp"}}, "outputs": {"y": {"0": "tp"}}}
    par = tmp_path / "hand.par"
    result = verified(tmp_path, (model, {}), [rank, rank], ports | {"sizes": {"batch": 4}})
    assert result.ok and result.sizes == ({"batch": 4},)
    assert onnxpar.verify(tmp_path / "model.onnx", par, dims={"batch": 6}).ok
    for number in range(2):
        (par / f"rank_000{number}.onnx").rename(par / f"part{number}.onnx")
    files = {"files": ["part0.onnx", "part1.onnx"], "sizes": {"batch": 4}}
    (par / "ports.json").write_text(json.dumps(ports | files))
    assert onnxpar.verify(tmp_path / "model.onnx", par).ok


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_exchanges_along_one_dimension(order: tuple[int, int], tmp_path: Path) -> None:
    """onnxruntime's AllToAll: equal blocks of rows."""
    model = "g (float[8,3] x) => (float[8,3] y) { y = Exp(x) }"
    text = """g (float[4,3] x) => (float[4,3] y) {
        e = Exp(x) y = com.microsoft.AllToAll<group_size=2>(e) }"""
    inputs = {"x": {"0": [[0, 4], [4, 8]]}}
    first = [[[0, 2], [4, 6]], [[2, 4], [6, 8]]]
    outputs = {"y": {"0": [first[i] for i in order]}}
    ports = TP | {"inputs": inputs, "outputs": outputs}
    assert verified(tmp_path, (model, {}), [(text, {})] * 2, ports).ok == (order == (0, 1))


def test_ranks_must_call_collectives_in_one_order(tmp_path: Path) -> None:
    model = "g (float[4] a, float[4] b) => (float y, float z) {\n"
    model += "y = ReduceSum<keepdims=0>(a) z = ReduceMax<keepdims=0>(b) }"
    head = "g (float[2] a, float[2] b) => (float y, float z) {\n"
    head += "s = ReduceSum<keepdims=0>(a) m = ReduceMax<keepdims=0>(b) "
    one, two = "y = AllReduce(s) ", "z = AllReduce:max(m) "
    ports = TP | {"inputs": {"a": {"0": "tp"}, "b": {"0": "tp"}}}
    right = [(head + one + two + "}", {})] * 2
    assert verified(tmp_path / "right", (model, {}), right, ports).ok
    wrong = [(head + one + two + "}", {}), (head + two + one + "}", {})]
    assert not verified(tmp_path / "wrong", (model, {}), wrong, ports).ok


def write(folder: Path, ports: object) -> list[str]:
    """A right folder; returns the command that verifies it."""
    verified(folder, (MODEL, W), [(RANK, part(r)) for r in range(2)], TP)
    text = ports if isinstance(ports, str) else json.dumps(ports)
    (folder / "hand.par" / "ports.json").write_text(text)
    return ["verify", str(folder / "model.onnx"), str(folder / "hand.par")]


WRONG_PORTS: dict[str, object] = {
    "not JSON": "{",
    "is not an object": [],
    "no key is named 'input'": TP | {"input": {}},
    "give the mesh": {},
    "mesh has 'tp'": {"mesh": {"tp": "2"}},
    "has no input 'z'": TP | {"inputs": {"z": {"0": "tp"}}},
    "has no output 'x'": TP | {"outputs": {"x": {"0": "tp"}}},
    "is divided over 'sum'; the mesh has tp": TP | {"outputs": {"y": {"0": "sum"}}},
    "has no dimension '2'": TP | {"outputs": {"y": {"2": "tp"}}},
    "cannot divide into equal parts": {"mesh": {"tp": 3}, "inputs": {"x": {"0": "tp"}}},
    "has the ranges of 1 ranks": TP | {"inputs": {"x": {"0": [[0, 4]]}}},
    "give [start, end] within 0 to 4": TP | {"inputs": {"x": {"0": [[0, 1 << 60], [0, 4]]}}},
    "holds positions of 'x' twice": TP | {"inputs": {"x": {"0": [[[0, 4], [0, 4]], [0, 4]]}}},
    "is not of the form": TP | {"inputs": {"x": ["tp"]}},
    "give pairs": TP | {"states": [["x"]]},
    "states that are no ports": TP | {"states": [["x", "z"]]},
    "files has 1 names": TP | {"files": ["a.onnx"]},
    "is in another folder": TP | {"files": ["../model.onnx", "rank_0001.onnx"]},
    "a mesh of 4294967296 ranks": {"mesh": {"a": 1 << 16, "b": 1 << 16}},
    "rank_0002.onnx cannot be read": {"mesh": {"tp": 3}},
    "ranges has 'x'": TP | {"ranges": {"x": [3, 3]}},
}


@pytest.mark.parametrize("message", WRONG_PORTS)
def test_wrong_ports(message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(write(tmp_path, WRONG_PORTS[message])) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def change(how: Callable[[onnx.ModelProto], object]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        model = onnx.load(file)
        how(model)
        onnx.save(model, file)

    return apply


def attribute(op: str, name: str, value: object) -> Callable[[Path], None]:
    def how(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == op)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change(how)


def external(**entries: str) -> Callable[[Path], None]:
    def how(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)

    return change(how)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def huge(file: Path) -> None:
    os.truncate(file, 1 << 34)


WRONG_FILES: dict[str, Callable[[Path], None]] = {
    "is not a file": pipe,
    "is in another folder": endless,
    "17,179,869,184 bytes": huge,
    "before it is made": change(lambda m: m.graph.node[0].input.__setitem__(0, "p")),
    "is made twice": change(lambda m: m.graph.node[1].output.__setitem__(0, "h")),
    "nothing makes the output": change(lambda m: m.graph.output.add(name="gone")),
    "two initializers": change(lambda m: m.graph.initializer.append(m.graph.initializer[0])),
    "the tensor 'up' cannot be read": change(
        lambda m: m.graph.initializer[0].dims.__setitem__(0, 1 << 40)
    ),
    "'x' has the group [0, 9]": attribute("DistCollective", "groups", [0, 9]),
    "which lacks rank 0": attribute("DistCollective", "groups", [1, 1]),
    "nb_rank=array": attribute(
        "DistCollective", "nb_rank", numpy_helper.from_array(np.float32([1, 2]))
    ),
    "nb_rank=3": attribute("DistCollective", "nb_rank", 3),
    "is 'gather', which is not known": attribute(
        "DistCollective", "collective_operation", "GATHER"
    ),
    "reduces by 'avg'": attribute("DistCollective", "reduce_op", "AVG"),
    "is FLOAT, not INT": change(
        lambda m: m.graph.node.append(helper.make_node("Softmax", ["y"], ["s"], axis=0.5))
    ),
    "is in another folder ": external(location="../model.onnx"),
    "is not there": external(location="gone.bin"),
    "it is not there, or not a file": external(),
    "smaller than requested": external(location="ports.json", offset="8"),
    "invalid literal": external(location="ports.json", offset="x"),
    "offset must be non-negative": external(location="ports.json", offset="-8"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("message", WRONG_FILES)
def test_wrong_files(message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = write(tmp_path, TP)
    WRONG_FILES[message](tmp_path / "hand.par" / "rank_0000.onnx")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message.strip().replace("'x'", "") in error.replace("'y'", ""), error
    assert error.count("\n") == 1


def test_constants_of_any_size_are_not_computed(tmp_path: Path) -> None:
    """A value of 8 TiB that a rank computes from constants."""
    text = """g (float[4,8] x) => (float[4,8] y) {
        big = ConstantOfShape(shape) one = ReduceMax<keepdims=0>(big) y = Add(x, one) }"""
    model = "g (float[4,8] x) => (float[4,8] y) { y = Add(x, one) }"
    ranks = [(text, {"shape": np.array([1 << 20, 1 << 21])})] * 2
    assert not verified(tmp_path, (model, {"one": np.float32(0)}), ranks, TP).ok


def test_softmax_of_another_opset(tmp_path: Path) -> None:
    """Before opset 13, it is over all dimensions from its axis on."""
    model = "g (float[4,3,2] x) => (float[4,3,2] y) { y = Softmax<axis=1>(x) }"
    verified(tmp_path, (model, {}), [(model, {})] * 2, TP)
    for rank in range(2):
        proto = parsed((model, {}), 1)
        proto.opset_import[0].version = 11
        onnx.save(proto, tmp_path / "hand.par" / f"rank_000{rank}.onnx")
    assert not onnxpar.verify(tmp_path / "model.onnx", tmp_path / "hand.par").ok


def test_an_integer_does_not_tell_of_the_numbers_before_it(tmp_path: Path) -> None:
    """An ArgMax is the same for most numbers if the mask of some is left out."""
    mask = np.array([0] * 14 + [-1e9] * 2, np.float32)
    values = weights(w=(8, 16)) | {"mask": mask}
    values["w"][:, 14:] = 0
    model = """g (float[4,8] x) => (int64[4,1] y) {
        h = MatMul(x, w) m = Add(h, mask) y = ArgMax<axis=1>(m) }"""
    bad = "g (float[4,8] x) => (int64[4,1] y) { h = MatMul(x, w) y = ArgMax<axis=1>(h) }"
    result = verified(tmp_path, (model, values), [(bad, values)] * 2, TP)
    assert [failure.tensor for failure in result.failures] == ["m"], result.text()


def test_parts_of_a_sum_that_were_exchanged(tmp_path: Path) -> None:
    """Both ranks add up the part of the first one."""
    text = """g (float[4,8] x) => (float[4,6] y) {
        h = MatMul(x, up) r = Relu(h) p = MatMul(r, down) all = AllGather(p)
        first, second = Split<axis=0>(all, rows) y = AllReduce(first) }"""
    ranks = [(text, part(rank, rows=np.array([4, 4]))) for rank in range(2)]
    result = verified(tmp_path, (MODEL, W), ranks, TP)
    assert [failure.tensor for failure in result.failures] == ["y"], result.text()


@pytest.mark.parametrize("stop, ok", [(20, True), (21, False)])
def test_a_cut_of_what_data_size(stop: int, ok: bool, tmp_path: Path) -> None:
    """Of 24 elements, between none and all are not zero."""
    model = """g (float[4,6] x) => (int64[2,K] y) {
        at = NonZero(x) y = Slice(at, start, stop, axis) }"""
    values = {"start": np.array([0]), "stop": np.array([20]), "axis": np.array([1])}
    rank = (model, {**values, "stop": np.array([stop])})
    assert verified(tmp_path, (model, values), [rank] * 2, TP).ok is ok


@pytest.mark.parametrize("axis", [0, 1])
def test_an_axis_of_one_rank(axis: int, tmp_path: Path) -> None:
    """Ranks take their rows; the second one takes columns, which nothing else tells."""
    model = "g (float[4,4] x) => (float[4,4] y) { y = Relu(x) }"
    text = """g (float[4,4] x) => (float[4,4] y) {
        own = Gather<axis=AXIS>(x, rows) r = Relu(own) y = AllGather(r) }"""
    ranks = [
        (text.replace("AXIS", f"{rank * axis}"), {"rows": np.array([2 * rank, 2 * rank + 1])})
        for rank in range(2)
    ]
    assert verified(tmp_path, (model, {}), ranks, TP).ok is (axis == 0)


@pytest.mark.parametrize("stop, ok", [(20, True), (21, False)])
def test_a_cut_in_a_branch_of_what_data_size(stop: int, ok: bool, tmp_path: Path) -> None:
    """The cut is in a body, and its end is a constant of the body."""
    text = """g (float[4,6] x, bool c) => (int64[2,K] y) {
        at = NonZero(x) y = If (c) <then_branch = t () => (int64[2,L] p) {
            start = Constant<value_ints=[0]>() stop = Constant<value_ints=[STOP]>()
            axis = Constant<value_ints=[1]>() p = Slice(at, start, stop, axis) },
        else_branch = e () => (int64[2,M] q) { q = Identity(at) }> }"""
    model, rank = (text.replace("STOP", str(end)) for end in (20, stop))
    assert verified(tmp_path, (model, {}), [(rank, {})] * 2, TP).ok is ok
