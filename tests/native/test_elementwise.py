"""FusedElementwise, against the same nodes one by one in onnxruntime: bits are equal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from native.ranks import node
from onnx import TensorProto, helper

from onnxpar.graph.elementwise_groups import OPERATIONS
from onnxpar.runtime.ranks.groups import World, session_options

Worlds = Callable[[int], list[World]]

BLOCK, GRAIN = 1024, 16384
ADAM = (
    "Mul x1 s0; Mul x2 s1; Add v0 v1; Mul x2 x2; Mul v3 s2; Mul x3 s3; Add v5 v4; Div v2 s4; "
    "Div v6 s5; Sqrt v8; Add v9 s6; Div v7 v10; Mul x0 s7; Sub x0 v12; Mul v11 s7; Sub v13 v14"
)
PROGRAMS: dict[str, tuple[str, list[int]]] = {
    # next parameter, mean and mean square; the latter are computed before all operands are read
    "adam": (ADAM, [15, 2, 6]),
    "every-op": (
        "Neg x0; Abs v0; Sqrt v1; Identity v2; Div s0 v3; Sub s1 v4; Add v5 x1",
        [6, 0, 3],
    ),
    "copies": ("Identity x1; Identity x0; Add v0 v1", [0, 1, 2, 2]),
    "sides": ("Sub x0 s0; Sub s0 x0; Div x0 s1; Div s1 x0; Mul s1 x1; Add s0 v4", [0, 1, 2, 3, 5]),
}
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, 1.0, -1.0], "f4"
)


def fused(program: str, results: Sequence[int], shape: Sequence[int | str]) -> bytes:
    """A model of one node."""
    tensors, scalars = (sorted(set(re.findall(rf"\b{kind}\d+", program))) for kind in "xs")
    outputs = [f"y{i}" for i, _ in enumerate(results)]
    attributes = {"program": program, "results": list(results)}
    nodes = [node("FusedElementwise", [*tensors, *scalars], outputs, name="node", **attributes)]
    return saved(nodes, tensors, scalars, outputs, shape)


def unfused(program: str, results: Sequence[int], shape: Sequence[int | str]) -> bytes:
    """The same with a node for each step."""
    tensors, scalars = (sorted(set(re.findall(rf"\b{kind}\d+", program))) for kind in "xs")
    steps = [step.split() for step in program.split(";")]
    nodes = [helper.make_node(op, operands, [f"v{i}"]) for i, (op, *operands) in enumerate(steps)]
    outputs = [f"y{i}" for i, _ in enumerate(results)]
    nodes += [
        helper.make_node("Identity", [f"v{step}"], [y])
        for step, y in zip(results, outputs, strict=True)
    ]
    return saved(nodes, tensors, scalars, outputs, shape)


def saved(
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[str],
    scalars: Sequence[str],
    outputs: Sequence[str],
    shape: Sequence[int | str],
) -> bytes:
    def typed(names: Sequence[str], dims: Sequence[int | str]) -> Iterator[onnx.ValueInfoProto]:
        return (helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n in names)

    graph = helper.make_graph(
        list(nodes), "g", [*typed(tensors, shape), *typed(scalars, [])], [*typed(outputs, shape)]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxpar", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def opened(world: World, model: bytes, threads: int = 1) -> ort.InferenceSession:
    options = session_options(world)
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def feeds_of(program: str, shape: Sequence[int]) -> dict[str, np.ndarray]:
    """Random values of all sizes, and the special ones between them."""
    draw = np.random.default_rng(0)
    names = sorted(set(re.findall(r"\bx\d+", program)))
    feeds = {}
    for name in names:
        x = (draw.standard_normal(shape) * 10.0 ** draw.integers(-20, 20, shape)).astype("f4")
        at = draw.random(shape) < 0.1
        x[at] = draw.choice(SPECIAL, int(at.sum()))
        feeds[name] = x
    scalars = sorted(set(re.findall(r"\bs\d+", program)))
    return {**feeds, **{s: np.array(draw.uniform(0.001, 1), "f4") for s in scalars}}


def assert_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """The same bits, except that NaNs may differ in theirs."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(found.view("u4")[~is_nan], expected.view("u4")[~is_nan])


@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_are_those_of_separate_nodes(worlds_of: Worlds, name: str) -> None:
    [world] = worlds_of(1)
    program, results = PROGRAMS[name]
    one, many = (opened(world, make(program, results, ["n"])) for make in (fused, unfused))
    sizes = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, BLOCK - 1, BLOCK, BLOCK + 1, GRAIN + 1, 3 * GRAIN)
    for size in sizes:
        feeds = feeds_of(program, [size])
        for found, expected in zip(one.run(None, feeds), many.run(None, feeds), strict=True):
            assert_bits(found, expected)


def test_every_operation_of_the_pass_is_tested() -> None:
    used = {step.split()[0] for program, _ in PROGRAMS.values() for step in program.split(";")}
    assert used == OPERATIONS


def test_threads_share_the_work(worlds_of: Worlds) -> None:
    [world] = worlds_of(1)
    program, results = PROGRAMS["adam"]
    shape = [3, GRAIN + 5]
    one = opened(world, fused(program, results, shape), threads=3)
    many = opened(world, unfused(program, results, shape), threads=1)
    feeds = feeds_of(program, shape)
    for found, expected in zip(one.run(None, feeds), many.run(None, feeds), strict=True):
        assert_bits(found, expected)


def test_a_result_may_overwrite_an_operand(worlds_of: Worlds) -> None:
    # y0 is known before x0 is read for the last time; x0 is a sum that nobody else reads
    [world] = worlds_of(1)
    nodes = [
        helper.make_node("Add", ["a", "b"], ["x0"]),
        node(
            "FusedElementwise",
            ["x0", "b"],
            ["z0", "z1"],
            program="Mul x1 x1; Neg x0; Sub v0 x0",
            results=[0, 2],
        ),
        *(helper.make_node("Abs", [f"z{i}"], [f"y{i}"]) for i in range(2)),
    ]
    one = opened(world, saved(nodes, ["a", "b"], [], ["y0", "y1"], [3000]))
    a, b = feeds_of("x0 x1", [3000]).values()
    for _ in range(2):
        with np.errstate(all="ignore"):
            expected = [np.abs(b * b), np.abs(b * b - (a + b))]
        for found, value in zip(one.run(None, {"a": a, "b": b}), expected, strict=True):
            assert_bits(found, value)


@pytest.mark.parametrize(
    "program, results, message",
    [
        ("Pow x0 s0", [0], "'Pow' is no operation; use Add, Sub"),
        ("Add x0", [0], "Add has 2 operands, not 1"),
        ("Neg x0 x1", [0], "Neg has 1 operands, not 2"),
        ("Add x0 v0", [0], "operand 'v0' in step 0"),
        ("Add x0 y0", [0], "operand 'y0' in step 0"),
        ("Add x0 x123456789", [0], "operand 'x123456789' in step 0"),
        ("Add s0 s1", [0], "reads only scalars"),
        ("Neg x0", [1], "results has 1, but the program has 1 steps"),
        ("Neg x0", [-1], "results has -1"),
        ("Neg x0", [], "attribute 'results' (ints) is missing or empty"),
        ("", [0], "reads no tensor"),
    ],
)
def test_wrong_programs(worlds_of: Worlds, program: str, results: list[int], message: str) -> None:
    [world] = worlds_of(1)
    attributes = {"program": program, **({"results": results} if results else {})}
    made = node("FusedElementwise", ["x0"], ["y0"], name="node", **attributes)
    with pytest.raises(Exception, match=re.escape(message)):
        opened(world, saved([made], ["x0"], [], ["y0"], [4]))


@pytest.mark.parametrize(
    "inputs, outputs, message",
    [
        (["x0", "x1"], ["y0"], "other numbers of inputs or outputs"),
        (["x0", "x1", "s0", "s0"], ["y0"], "other numbers of inputs or outputs"),
        (["x0", "x1", "s0"], ["y0", "y1"], "other numbers of inputs or outputs"),
        (["x0", "other", "s0"], ["y0"], "input 1 has shape [5]; it must have that of input 0, [4]"),
        (["x0", "x1", "other"], ["y0"], "input 2 has shape [5]; it must have one element"),
    ],
)
def test_wrong_inputs(
    worlds_of: Worlds, inputs: list[str], outputs: list[str], message: str
) -> None:
    [world] = worlds_of(1)
    made = node("FusedElementwise", inputs, outputs, program="Add x0 x1; Mul v0 s0", results=[1])
    fed = {"x0": [4], "x1": [4], "s0": [], "other": [5]}
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in [*fed, *outputs]
    ]
    graph = helper.make_graph([made], "g", values[:4], values[4:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxpar", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    one = opened(world, model)
    with pytest.raises(Exception, match=re.escape(message)):
        one.run(None, {name: np.ones(shape, "f4") for name, shape in fed.items()})
