"""Strings, sequences, maps, optionals and sizes that data decides, beside what is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

import onnxpar
from onnxpar.base.errors import InputError, ModelError
from onnxpar.cli.command_line import main
from onnxpar.report.compare import compare
from onnxpar.runtime.session.session import InferenceSession, Session
from onnxpar.runtime.session.threads import ThreadSession

FLOAT, INT, BOOL, STRING = (
    TensorProto.FLOAT,
    TensorProto.INT64,
    TensorProto.BOOL,
    TensorProto.STRING,
)
X = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
FLOATS = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))
MAYBE = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, None))
MAYBE_FLOATS = helper.make_optional_type_proto(FLOATS)
WORDS = np.array(["one", "two", "one", "six", "two", "one"], object)


def node(op: str, inputs: str, outputs: str, domain: str = "", **attrs: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), outputs, domain=domain, **attrs)


def tensor(shape: Sequence[int | str] | None, dtype: int = FLOAT) -> TypeProto:
    return helper.make_tensor_type_proto(dtype, shape)


@dataclass(frozen=True)
class Case:
    """A model: what it is fed comes with its inputs; `h`, relu of x, is split on all ranks."""

    nodes: Sequence[NodeProto]
    outputs: Mapping[str, TypeProto]
    inputs: Mapping[str, tuple[TypeProto, Any]] = field(default_factory=dict)
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)

    def write(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        given = {"x": (tensor([6, 4]), X), **self.inputs}
        graph = helper.make_graph(
            [node("Relu", "x", "h"), *self.nodes],
            "values",
            [helper.make_value_info(n, t) for n, (t, _) in given.items()],
            [helper.make_value_info(n, t) for n, t in self.outputs.items()],
            [numpy_helper.from_array(w, n) for n, w in self.weights.items()],
        )
        opsets = [("", 19), ("ai.onnx.ml", 3), ("com.microsoft", 1)]
        imports = [helper.make_opsetid(*entry) for entry in opsets]
        made = helper.make_model(graph, opset_imports=imports, ir_version=9)
        path = folder / "m.onnx"
        path.write_bytes(made.SerializeToString())
        return path, {n: v for n, (_, v) in given.items()}


def branch(name: str, nodes: Sequence[NodeProto], output: ValueInfoProto) -> Any:
    return helper.make_graph(list(nodes), name, [], [output])


def infos(**types: TypeProto) -> list[ValueInfoProto]:
    return [helper.make_value_info(n, t) for n, t in types.items()]


BOXES = np.array([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 10, 1, 11]]], np.float32)
GROW = helper.make_graph(
    [node("Identity", "go", "on"), node("SequenceInsert", "s h", "t")],
    "grow",
    infos(i=tensor([], INT), go=tensor([], BOOL), s=FLOATS),
    infos(on=tensor([], BOOL), t=FLOATS),
)
HAVE = branch("have", [node("OptionalGetElement", "o", "a")], *infos(a=tensor(None)))
LACK = branch("lack", [node("Identity", "h", "b")], *infos(b=tensor(None)))
CASES = {
    "sequence made, read and joined": Case(
        [
            node("Exp", "h", "e"),
            node("SequenceConstruct", "h e", "s"),
            node("SequenceAt", "s one", "a"),
            node("ConcatFromSequence", "s", "c", axis=0),
            node("Tanh", "a", "y"),
            node("Sigmoid", "c", "z"),
            node("SequenceLength", "s", "n"),
        ],
        {"y": tensor([6, 4]), "z": tensor([12, 4]), "n": tensor([], INT)},
        weights={"one": np.array(1)},
    ),
    "sequence returned": Case([node("SplitToSequence", "h", "s", axis=0)], {"s": FLOATS}),
    "sequence fed and returned": Case(
        [
            node("SequenceInsert", "s h", "t"), node("SequenceAt", "s at", "a"),
            node("Add", "a h", "y"),
        ],
        {"t": FLOATS, "y": tensor([6, 4])},
        {"s": (FLOATS, [X, X * 2])},
        {"at": np.array(-1)},
    ),
    "empty sequence fed": Case(
        [node("SequenceLength", "s", "n")], {"n": tensor([], INT)}, {"s": (FLOATS, [])}
    ),
    "sequence grown in a loop": Case(
        [
            node("SequenceEmpty", "", "s0"),
            helper.make_node("Loop", ["n", "", "s0"], ["s"], "loop", body=GROW),
            node("ConcatFromSequence", "s", "y", axis=1),
        ],
        {"y": tensor([6, 12]), "s": FLOATS},
        weights={"n": np.array(3)},
    ),
    "optional of nothing": Case(
        [node("Optional", "", "y", type=helper.make_tensor_type_proto(FLOAT, None))], {"y": MAYBE}
    ),
    "optional made": Case([node("Optional", "h", "y")], {"y": MAYBE}),
    "optional fed": Case(
        [
            node("OptionalHasElement", "o", "has"),
            helper.make_node("If", ["has"], ["a"], "if", then_branch=HAVE, else_branch=LACK),
            node("Add", "a h", "y"),
        ],
        {"y": tensor([6, 4]), "has": tensor([], BOOL)},
        {"o": (MAYBE, X)},
    ),
    "nothing fed": Case(
        [
            node("OptionalHasElement", "o", "has"),
            helper.make_node("If", ["has"], ["a"], "if", then_branch=HAVE, else_branch=LACK),
            node("Add", "a h", "y"),
            node("Identity", "o", "same"),
        ],
        {"y": tensor([6, 4]), "same": MAYBE},
        {"o": (MAYBE, None)},
    ),
    "optional sequence": Case(
        [node("Identity", "o", "same")], {"same": MAYBE_FLOATS}, {"o": (MAYBE_FLOATS, [X])}
    ),
    "maps returned": Case(
        [node("ZipMap", "h", "m", "ai.onnx.ml", classlabels_int64s=[4, 3, 2, 1])],
        {"m": helper.make_sequence_type_proto(helper.make_map_type_proto(INT, tensor([])))},
    ),
    "map fed": Case(
        [
            node("DictVectorizer", "m", "v", "ai.onnx.ml", string_vocabulary=["a", "b", "c", "d"]),
            node("Add", "v h", "y"),
        ],
        {"y": tensor([6, 4])},
        {"m": (helper.make_map_type_proto(STRING, tensor([])), {"a": 1.5, "d": 2.0})},
    ),
    "strings returned": Case(
        [
            node("StringNormalizer", "w", "u", case_change_action="UPPER", locale="C"),
            node("LabelEncoder", "w", "i", "ai.onnx.ml", keys_strings=["one", "two", "six"],
                 values_int64s=[1, 2, 0]),
            node("Gather", "h i", "y", axis=0),
        ],
        {"u": tensor(["n"], STRING), "y": tensor([6, 4])},
        {"w": (tensor([6], STRING), WORDS)},
    ),
    "strings of numbers": Case(
        [
            node("Cast", "h", "t", to=STRING), node("Cast", "t", "u", to=FLOAT),
            node("Add", "u h", "y"),
        ],
        {"y": tensor([6, 4]), "t": tensor([6, 4], STRING)},
    ),
    "strings counted": Case(
        [
            node("TfIdfVectorizer", "w", "v", mode="TF", min_gram_length=1, max_gram_length=1,
                 max_skip_count=0, ngram_counts=[0], ngram_indexes=[0, 1, 2, 3],
                 pool_strings=["one", "two", "six", "ten"]),
            node("Add", "v h", "y"),
        ],
        {"y": tensor([6, 4])},
        {"w": (tensor([6], STRING), WORDS)},
    ),
    "strings stored": Case(
        [
            node("Equal", "w k", "q"), node("Where", "q one h", "y"),
            node("Gather", "k at", "g"), node("Identity", "k", "same"),
        ],
        {"y": tensor([6, 4]), "g": tensor([2], STRING), "same": tensor([6, 1], STRING)},
        {"w": (tensor([6, 1], STRING), WORDS[:, None])},
        {
            "k": np.array([["one"]] * 6, object),
            "one": np.array(1, np.float32),
            "at": np.array([[0]]),
        },
    ),
    "non-zeros": Case(
        [node("NonZero", "h", "at"), node("Transpose", "at", "rows", perm=[1, 0]),
         node("GatherND", "h rows", "y")],
        {"y": tensor(["n"]), "at": tensor([2, "n"], INT)},
    ),
    "unique": Case(
        [node("Unique", "h", "u i j k"), node("Exp", "u", "y"), node("Gather", "u j", "z")],
        {"y": tensor(["n"]), "z": tensor([24])},
    ),
    "compressed": Case(
        [node("Compress", "h keep", "c", axis=0), node("Softmax", "c", "y")],
        {"y": tensor(["n", 4])},
        {"keep": (tensor([6], BOOL), np.array([True, False, True, True, False, False]))},
    ),
    "boxes": Case(
        [
            node("Slice", "h start end", "part"), node("Reshape", "part three", "scores"),
            node("NonMaxSuppression", "boxes scores most", "kept"),
            node("Gather", "kept two", "rows", axis=1), node("Gather", "h rows", "y", axis=0),
        ],
        {"y": tensor(["n", 4]), "kept": tensor(["n", 3], INT)},
        weights={
            "boxes": BOXES, "most": np.array([2]), "two": np.array(2),
            "start": np.array([0, 0]), "end": np.array([1, 3]), "three": np.array([1, 1, 3]),
        },
    ),
}  # fmt: skip


def split_rows(path: Path, par: Path, ranks: int) -> onnxpar.Plan:
    """Shards so that x and h are split by rows."""
    strategy = {"shard": {"h": [["dp", None]]}}
    return onnxpar.shard(path, par, mesh=f"dp={ranks}", strategy=strategy, check_layouts=True)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_unsplit_model(tmp_path: Path, name: str, ranks: int) -> None:
    path, feeds = CASES[name].write(tmp_path)
    plan = split_rows(path, tmp_path / "m.par", ranks)
    layouts = {p.name: p.layout for p in plan.inputs}
    assert layouts["x"] is not None and not layouts["x"].is_whole
    with ThreadSession(tmp_path / "m.par") as session:
        for _ in range(2):
            report = compare(path, session, feeds)
            assert report.ok, report.text()
        _check_ports(session, ort.InferenceSession(str(path)))


def _check_ports(session: Session, whole: ort.InferenceSession) -> None:
    for own, wanted in (
        (session.get_inputs(), whole.get_inputs()),
        (session.get_outputs(), whole.get_outputs()),
    ):
        assert [(p.name, p.type) for p in own] == [(p.name, p.type) for p in wanted]


@pytest.mark.slow
def test_values_go_between_processes(tmp_path: Path) -> None:
    for name in ("nothing fed", "strings returned"):
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        path, feeds = CASES[name].write(folder)
        split_rows(path, folder / "m.par", 2)
        with InferenceSession(folder / "m.par") as session:
            for _ in range(2):
                report = compare(path, session, feeds)
                assert report.ok, report.text()


def test_an_optional_input_may_be_left_out(tmp_path: Path) -> None:
    path, _ = CASES["nothing fed"].write(tmp_path)
    split_rows(path, tmp_path / "m.par", 2)
    with ThreadSession(tmp_path / "m.par") as session:
        y, same = session.run(None, {"x": X})
    wanted = ort.InferenceSession(str(path)).run(None, {"x": X})
    np.testing.assert_array_equal(y, wanted[0])
    assert same is None and wanted[1] is None


def test_sequences_stay_on_their_ranks(
    tmp_path: Path, open_session: Callable[..., Session]
) -> None:
    path, feeds = CASES["sequence fed and returned"].write(tmp_path)
    onnxpar.shard(path, tmp_path / "m.par", mesh="dp=2", strategy={}, states=[("s", "t")])
    whole = ort.InferenceSession(str(path))
    with open_session(tmp_path / "m.par") as session:
        session.states.write("s", feeds["s"])
        kept = feeds["s"]
        for _ in range(2):
            (y,) = session.run(["y"], {"x": X}, keep_states=True)
            kept, wanted = whole.run(None, {"x": X, "s": kept})
            np.testing.assert_allclose(y, wanted, rtol=1e-6)
        read = session.states.read("s")
        assert len(read) == len(kept) == 4
        np.testing.assert_array_equal(np.stack(read), np.stack(kept))


BAD: dict[str, tuple[str, str, Any, str]] = {
    "no list": ("sequence fed and returned", "s", X, r"'s' is a seq\(tensor\(float\)\).*a list"),
    "doubles": (
        "sequence fed and returned",
        "s",
        [X.astype("f8")],
        "arrays of float32, not float64",
    ),
    "numbers": ("strings returned", "w", np.arange(6), "str, not int64"),
    "bytes": ("strings returned", "w", np.array([b"a"] * 6), "str, not"),
    "size": ("strings returned", "w", WORDS[:5], r"shape \[5\], but the model takes \[6\]"),
    "keys": ("map fed", "m", {1: 1.0}, "keys of str"),
    "values": ("map fed", "m", {"a": "b"}, "values of tensor"),
}


@pytest.mark.parametrize("bad", BAD)
def test_wrong_values_are_refused_before_the_run(tmp_path: Path, bad: str) -> None:
    case, name, value, message = BAD[bad]
    path, feeds = CASES[case].write(tmp_path)
    split_rows(path, tmp_path / "m.par", 2)
    with ThreadSession(tmp_path / "m.par") as session:
        with pytest.raises(InputError, match=message):
            session.run(None, {**feeds, name: value})
        assert compare(path, session, feeds).ok


def test_what_python_cannot_return_beside_values_is_refused(tmp_path: Path) -> None:
    case = Case(
        [node("Cast", "h", "y", to=TensorProto.BFLOAT16), node("SequenceConstruct", "h", "s")],
        {"y": tensor([6, 4], TensorProto.BFLOAT16), "s": FLOATS},
    )
    path, _ = case.write(tmp_path)
    split_rows(path, tmp_path / "m.par", 2)
    with pytest.raises(ModelError, match="'y' is bfloat16"):
        ThreadSession(tmp_path / "m.par")


@pytest.mark.slow
def test_check_makes_up_strings_and_asks_for_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = CASES["strings counted"].write(tmp_path)
    assert main(["check", str(path), "--devices", "2"]) == 0
    path, feeds = CASES["sequence fed and returned"].write(tmp_path)
    assert main(["check", str(path), "--devices", "2"]) != 0
    assert "NAME.0" in capsys.readouterr().err
    arrays = {"x": X, **{f"s.{i}": a for i, a in enumerate(feeds["s"])}}
    np.savez(tmp_path / "in.npz", **arrays)
    inputs = ["--inputs", str(tmp_path / "in.npz")]
    assert main(["check", str(path), "--devices", "2", *inputs]) == 0


def test_a_difference_inside_a_value_is_found(tmp_path: Path) -> None:
    path, feeds = CASES["sequence returned"].write(tmp_path)
    split_rows(path, tmp_path / "m.par", 2)
    with ThreadSession(tmp_path / "m.par") as session:
        run = session.run
        for change in (lambda s: s[:-1], lambda s: [*s, s[0]], lambda s: [s[0] + 1, *s[1:]]):
            session.run = lambda *a, change=change: [change(run(*a)[0])]  # type: ignore[method-assign]
            assert not compare(path, session, feeds).ok
