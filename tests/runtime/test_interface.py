"""What onnxruntime's InferenceSession and IOBinding can do, a sharded session can, too."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from runtime.bundles import Tensor, pids, write_par

import onnxpar
from onnxpar.base.errors import InputError, ModelError, OnnxparError, RankError
from onnxpar.runtime.session.interface import Interface
from onnxpar.runtime.session.io_binding import IOBinding
from onnxpar.runtime.session.ort_values import array_of
from onnxpar.runtime.session.session import InferenceSession, Session
from onnxpar.runtime.session.threads import ThreadSession

C = ort.capi._pybind_state
RANDOM = np.random.default_rng(0)
SHAPE = (8, 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products, y and z, of x (n,16), with all that a model can say of itself."""
    shapes = {"w": (16, 4), "v": (16, 6)}
    weights = [
        numpy_helper.from_array(RANDOM.standard_normal(shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [helper.make_node("MatMul", ["x", w], [y], y) for w, y in (("w", "y"), ("v", "z"))]
    ports = {"x": ["n", 16], "y": ["n", 4], "z": ["n", 6]}
    x, *outputs = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in ports.items())
    graph = helper.make_graph(nodes, "the-graph", [x], outputs, weights, doc_string="graph doc")
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made.producer_name, made.domain, made.doc_string = "me", "my.domain", "model doc"
    made.model_version = 7
    helper.set_model_props(made, {"author": "somebody"})
    path = tmp_path_factory.mktemp("interface") / "m.onnx"
    onnx.save(made, path)
    return path


@pytest.fixture(scope="module")
def reference(model: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def sharded(model: Path) -> Path:
    par = model.with_suffix(".par")
    strategy = {"mesh": {"tp": 2}, "shard": {"y": [[None, "tp"], ["tp", None]]}}
    onnxpar.shard(model, par, strategy=strategy)
    return par


@pytest.fixture(scope="module")
def session(sharded: Path) -> Iterator[Session]:
    with ThreadSession(sharded) as opened:
        yield opened


def x_of(rows: int = 8) -> np.ndarray[Any, Any]:
    return RANDOM.standard_normal((rows, 16)).astype(np.float32)


def close(given: Any, wanted: Any) -> None:
    np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5)


def public(of: type) -> list[str]:
    return [name for name in dir(of) if not name.startswith("_")]


def own(of: type, name: str) -> bool:
    """Whether onnxpar has it, rather than inherits it."""
    return next(c for c in of.__mro__ if name in vars(c)).__module__.startswith("onnxpar")


def is_compatible(ours: Any, theirs: Any) -> bool:
    """Whether any call that theirs takes has a meaning for ours: the same names in the same places,
    and nothing more that must be given."""
    mine, other = (list(inspect.signature(f).parameters.values()) for f in (ours, theirs))
    for at, parameter in enumerate(other):
        same = mine[at] if at < len(mine) else None
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            same = next((p for p in mine if p.name == parameter.name), None)
        if same is None or same.name != parameter.name:
            return False
        if parameter.default is not parameter.empty and same.default is same.empty:
            return False
    rest = mine[len(other) :]
    return all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD,) for p in rest)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(InferenceSession, ort.InferenceSession), (IOBinding, ort.IOBinding)]
)
def test_every_method_is_there(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs)
    for name in public(theirs):
        assert own(ours, name), f"{ours.__name__}.{name} is onnxruntime's own, which has no session"
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert inspect.getdoc(mine), name
        assert is_compatible(mine, other), f"{name}{inspect.signature(mine)}, not of {other}"
    assert is_compatible(ours.__init__, theirs.__init__)


def test_signatures_that_differ_are_found() -> None:
    def theirs(self: Any, a: Any, b: Any = 1, *, c: Any = 2) -> None: ...
    def renamed(self: Any, x: Any, b: Any = 1, *, c: Any = 2) -> None: ...
    def strict(self: Any, a: Any, b: Any, *, c: Any = 2) -> None: ...
    def lacking(self: Any, a: Any, b: Any = 1) -> None: ...
    def more(self: Any, a: Any, b: Any = 1, *, c: Any = 2, d: Any) -> None: ...
    def wider(self: Any, a: Any, b: Any = 1, *, c: Any = 2, d: Any = 3) -> None: ...

    assert is_compatible(wider, theirs)
    for wrong in (renamed, strict, lacking, more):
        assert not is_compatible(wrong, theirs)


CALLS: dict[str, tuple[Any, ...]] = {
    "run": (None, {"x": x_of()}),
    "run_async": (None, {"x": x_of()}, lambda *_: None, None),
    "run_with_ort_values": (None, {"x": ort.OrtValue.ortvalue_from_numpy(x_of())}),
    "run_with_iobinding": (None,),
    "run_with_ortvaluevector": (None, [], [], [], C.OrtValueVector(), []),
    "create_ortvalue_from_shape_and_type": ([2], np.float32, "cpu"),
    "set_tuning_results": ([{}],),
    "set_ep_dynamic_options": ({"a": "b"},),
}


@pytest.mark.parametrize("name", public(ort.InferenceSession))
def test_every_method_answers_or_says_why_not(name: str, session: Session) -> None:
    try:
        getattr(session, name)(*CALLS.get(name, ()))
    except OnnxparError as error:
        assert len(str(error)) > 20


def test_what_versions_to_come_add_says_why_not(session: Session) -> None:
    class Newer(ort.InferenceSession):  # type: ignore[misc]
        def brand_new(self) -> Any:
            return self._sess.brand_new()

    with pytest.raises(InputError, match="brand_new is not available for a sharded model"):
        Newer.brand_new(session)


def test_what_it_says_of_itself(session: Session, reference: ort.InferenceSession) -> None:
    mine, other = session.get_modelmeta(), reference.get_modelmeta()
    for name in public(type(other)):
        assert getattr(mine, name) == getattr(other, name), name
    for name in ("get_providers", "get_provider_options", "get_tuning_results"):
        assert getattr(session, name)() == getattr(reference, name)()
    for name in ("get_inputs", "get_outputs", "get_overridable_initializers"):
        found, wanted = getattr(session, name)(), getattr(reference, name)()
        assert [(a.name, a.type, a.shape) for a in found] == [
            (a.name, a.type, a.shape) for a in wanted
        ]
    for name in ("get_input_memory_infos", "get_output_memory_infos"):
        if hasattr(reference, name):
            found, wanted = getattr(session, name)(), getattr(reference, name)()
            for fact in ("name", "device_id", "mem_type", "allocator_type"):
                assert [getattr(i, fact) for i in found] == [getattr(i, fact) for i in wanted]
    if hasattr(reference, "get_input_epdevices"):
        found, wanted = session.get_input_epdevices(), reference.get_input_epdevices()
        assert [d.ep_name for d in found] == [d.ep_name for d in wanted]


def test_a_model_without_metadata(tmp_path: Path) -> None:
    ports = [Tensor("x", (4,)), Tensor("y", (4,))]
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    with ThreadSession(
        write_par(tmp_path, "tp=2", ports[:1], ports[1:], lambda r: nodes)
    ) as session:
        assert session.get_modelmeta().custom_metadata_map == {}


def test_options_are_those_given(sharded: Path) -> None:
    options = ort.SessionOptions()
    options.logid = "mine"
    with ThreadSession(sharded, options) as session:
        assert session.get_session_options() is options
    assert isinstance(ThreadSession(sharded).get_session_options(), ort.SessionOptions)


def test_ort_values(session: Session, reference: ort.InferenceSession) -> None:
    x = x_of(5)
    fed = {"x": ort.OrtValue.ortvalue_from_numpy(x)}
    for names in (None, [], ["z"], ["z", "y"]):
        found = session.run_with_ort_values(names, fed)
        wanted = reference.run_with_ort_values(names, fed)
        assert [v.data_type() for v in found] == [v.data_type() for v in wanted]
        for mine, other in zip(found, wanted, strict=True):
            close(mine.numpy(), other.numpy())
    close(session.run(["y"], fed)[0], reference.run(["y"], fed)[0])
    device = ort.OrtDevice.make("cpu", 0)._get_c_device()
    feeds, fetches = C.OrtValueVector(), C.OrtValueVector()
    feeds.push_back(fed["x"]._ortvalue)
    session.run_with_ortvaluevector(None, ["x"], feeds, ["z"], fetches, [device])
    close(fetches[0].numpy(), reference.run(["z"], {"x": x})[0])
    with pytest.raises(InputError, match="empty"):
        session.run_with_ortvaluevector(None, ["x"], feeds, ["z"], fetches, [device])


def test_bound_arrays(session: Session, reference: ort.InferenceSession) -> None:
    x, y = x_of(), np.full((8, 4), np.nan, np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("z")
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    binding.synchronize_inputs()
    for _ in range(2):
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        wanted = reference.run(["z", "y"], {"x": x})
        close(y, wanted[1])
        for found in (
            binding.copy_outputs_to_cpu(),
            [value.numpy() for value in binding.get_outputs()],
            [value.numpy() for value in binding.get_outputs_as_ortvaluevector()],
        ):
            for mine, other in zip(found, wanted, strict=True):
                close(mine, other)
        x[...] = x_of()  # the same memory: the next run reads it
    assert binding.get_outputs()[1].data_ptr() == y.ctypes.data


def test_bound_ort_values_and_pointers(session: Session, reference: ort.InferenceSession) -> None:
    x = x_of(3)
    target = session.create_ortvalue_from_shape_and_type([3, 4], np.float32, "cpu")
    binding = ort.IOBinding(session)  # as Optimum makes it
    assert type(binding) is IOBinding
    for bind in (
        lambda: binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(x)),
        lambda: binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data),
        lambda: binding.bind_input("x", "cpu", 0, TensorProto.FLOAT, list(x.shape), x.ctypes.data),
    ):
        binding.clear_binding_inputs()
        binding.clear_binding_outputs()
        bind()
        binding.bind_ortvalue_output("y", target)
        target.update_inplace(np.zeros((3, 4), np.float32))
        session.run_with_iobinding(binding)
        close(target.numpy(), reference.run(["y"], {"x": x})[0])
        assert binding.get_outputs()[0] is target
    assert type(ort.IOBinding(reference)) is ort.IOBinding  # others are what they were
    assert type(reference.io_binding()) is ort.IOBinding


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "float8_e4m3fn", "bool", "float16"])
def test_bound_memory_of_any_type(dtype: str, tmp_path: Path) -> None:
    element = {"bfloat16": 16, "int4": 22, "float8_e4m3fn": 17, "bool": 9, "float16": 10}[dtype]
    port = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Transpose", ["x"], ["y"])],
        "g",
        [port("x", element, [4, 6])],
        [port("y", element, [6, 4])],
    )
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    onnxpar.shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=2, preset="data-parallel")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    value = RANDOM.integers(0, 2, (4, 6)).astype(kind)
    with ThreadSession(tmp_path / "m.par") as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", value)
        target = session.create_ortvalue_from_shape_and_type([6, 4], element, "cpu")
        binding.bind_ortvalue_output("y", target)
        session.run_with_iobinding(binding)
        (y,) = binding.copy_outputs_to_cpu()
        np.testing.assert_array_equal(y, value.T)
        source = onnxpar.runtime.session.tensors.copy_of(value)
        (again,) = session.run_with_ort_values(None, {"x": source})
        for found in (target, again):
            np.testing.assert_array_equal(array_of(found), value.T)


def test_strings_are_bound_but_are_no_ort_values(tmp_path: Path) -> None:
    port = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["s"], ["t"]), helper.make_node("Neg", ["x"], ["y"])],
        "g",
        [port("s", TensorProto.STRING, [2]), port("x", TensorProto.FLOAT, [4])],
        [port("t", TensorProto.STRING, [2]), port("y", TensorProto.FLOAT, [4])],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    onnxpar.shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=2, preset="data-parallel")
    arrays = {"s": np.array(["a", "bc"], object), "x": np.arange(4, dtype=np.float32)}
    with ThreadSession(tmp_path / "m.par") as session:
        binding = session.io_binding()
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)
        for name in "ty":
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        t, y = binding.copy_outputs_to_cpu()
        assert list(t) == ["a", "bc"] and list(y) == [0, -1, -2, -3]
        for get in (binding.get_outputs, lambda: session.run_with_ort_values(["t"], arrays)):
            with pytest.raises(InputError, match="'t' is not a tensor of numbers"):
                get()
        with pytest.raises(InputError, match="memory of object"):
            binding.bind_output("t", "cpu", 0, np.float32, [2], 1)


BAD_BINDINGS: dict[str, tuple[Any, str]] = {
    "no input": (lambda b: b.bind_cpu_input("q", x_of()), "no input is named 'q'"),
    "no output": (lambda b: b.bind_output("q"), "no output is named 'q'"),
    "no output for a value": (
        lambda b: b.bind_ortvalue_output("q", ort.OrtValue.ortvalue_from_numpy(x_of())),
        "no output is named 'q'",
    ),
    "dtype": (lambda b: b.bind_cpu_input("x", np.zeros(SHAPE)), "expects float32"),
    "shape": (lambda b: b.bind_input("x", "cpu", 0, np.float32, [8, 3], 1), "expects float32"),
    "device": (lambda b: b.bind_output("y", "cuda"), "CPU memory only"),
    "output dtype": (lambda b: b.bind_output("y", "cpu", 0, np.int8, [8, 4], 1), "memory of float"),
    "no type": (lambda b: b.bind_output("y", buffer_ptr=1), "element_type and shape"),
    "unknown type": (lambda b: b.bind_input("x", "cpu", 0, 999, [8, 16], 1), "element type 999"),
    "not run": (lambda b: (b.bind_output("y"), b.get_outputs()), "call run_with_iobinding first"),
}


@pytest.mark.parametrize("name", BAD_BINDINGS)
def test_bad_bindings(name: str, session: Session) -> None:
    call, words = BAD_BINDINGS[name]
    with pytest.raises(InputError, match=words):
        call(session.io_binding())


def test_bad_bound_runs(session: Session, sharded: Path) -> None:
    binding = session.io_binding()
    with pytest.raises(InputError, match="no output is bound"):
        session.run_with_iobinding(binding)
    small, z = np.zeros((2, 4), np.float32), np.zeros((8, 6), np.float32)
    binding.bind_output("z", "cpu", 0, np.float32, z.shape, z.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, small.shape, small.ctypes.data)
    with pytest.raises(InputError, match="'x' is not fed"):
        session.run_with_iobinding(binding)
    binding.bind_cpu_input("x", x_of())
    with pytest.raises(InputError, match=r"has the shape \[8, 4\], but the memory .* \[2, 4\]"):
        session.run_with_iobinding(binding)
    assert not z.any()  # nothing is written where not all can be
    with ThreadSession(sharded) as other, pytest.raises(InputError, match="of another session"):
        other.run_with_iobinding(binding)


def test_async_runs_come_in_order(sharded: Path, reference: ort.InferenceSession) -> None:
    told: list[tuple[Any, Any, str]] = []
    done = threading.Event()

    def callback(results: Any, user_data: Any, error: str) -> None:
        told.append((results, user_data, error))
        if user_data == 9:
            done.set()
        raise_in_callbacks = user_data == 3
        assert not raise_in_callbacks, "of the user's code; it must not end the others"

    feeds = [x_of(number + 1) for number in range(10)]
    with ThreadSession(sharded) as session:
        for number, x in enumerate(feeds):
            names = ["nope"] if number == 5 else ["y"]
            session.run_async(names, {"x": x}, callback, number)
        assert done.wait(60)
    assert [user_data for _, user_data, _ in told] == list(range(10))
    for (results, number, error), x in zip(told, feeds, strict=True):
        if number == 5:
            assert "no output is named 'nope'" in error and not results
        else:
            assert not error
            close(results[0], reference.run(["y"], {"x": x})[0])
    with pytest.raises(RankError, match="closed"):
        session.run_async(None, {"x": feeds[0]}, callback, 0)


@pytest.mark.processes
def test_other_providers_are_other_ranks(sharded: Path, reference: ort.InferenceSession) -> None:
    x = x_of()
    with InferenceSession(sharded) as session:
        before = pids(session)
        session.disable_fallback()
        session.set_providers([("CPUExecutionProvider", {"use_arena": "0"})])
        assert session.get_providers() == ["CPUExecutionProvider"]
        assert not {*before} & {*pids(session)}
        close(session.run(["y"], {"x": x})[0], reference.run(["y"], {"x": x})[0])
        with pytest.raises(InputError, match="cannot fall back"):
            session.enable_fallback()
    with pytest.raises(RankError, match="closed"):
        session.set_providers(["CPUExecutionProvider"])


@pytest.mark.slow
def test_profiles(
    sharded: Path,
    reference: ort.InferenceSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ort.SessionOptions()
    options.enable_profiling = True
    with InferenceSession(sharded, options) as session:
        session.run(None, {"x": x_of()})
        assert session.get_profiling_start_time_ns() > 0
        file = session.end_profiling()
    assert "rank0" in file and any(
        e["name"] == "model_run" for e in json.loads(Path(file).read_text())
    )
    assert list(tmp_path.glob("*rank1*.json"))
    with InferenceSession(sharded, profile=True) as session:
        session.run(None, {"x": x_of()})
        assert "traceEvents" in json.loads(Path(session.end_profiling()).read_text())
    with ThreadSession(sharded) as session:
        assert session.end_profiling() == reference.end_profiling() == ""
        with pytest.raises(InputError, match="profile=True"):
            session.end_profile(tmp_path / "trace.json")


def test_disabled_optimizers_reach_the_ranks(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["n"]), helper.make_node("Neg", ["n"], ["y"])]
    ports = [Tensor("x", (4,)), Tensor("y", (4,))]
    par = write_par(tmp_path / "m.par", "tp=2", ports[:1], ports[1:], lambda rank: nodes)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "seen.onnx")
    InferenceSession(par, options, disabled_optimizers=["EliminateIdentity"]).close()
    seen = [node.op_type for node in onnx.load(tmp_path / "seen.rank0.onnx").graph.node]
    assert seen == ["Identity", "Neg"]


def test_what_is_no_folder(model: Path, sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a folder, not bytes: .*onnxpar\.shard"):
        InferenceSession(model.read_bytes())
    with pytest.raises(ModelError, match=r"`onnxpar shard .*m\.onnx --devices N`"):
        InferenceSession(model)
    with pytest.raises(ModelError, match="there is no folder"):
        InferenceSession(tmp_path / "nope.par")
    with pytest.raises(ModelError, match="is not a sharded model"):
        InferenceSession(tmp_path)
    with pytest.raises(InputError, match="sess_options"):
        InferenceSession(sharded, read_config_from_model=1)


def test_the_class_says_what_it_stands_for() -> None:
    with pytest.raises(NotImplementedError):
        Interface.run(object(), None, {})  # type: ignore[arg-type]
