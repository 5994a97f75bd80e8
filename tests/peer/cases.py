"""ONNX's own test-suite: its cases, in a form that the unsplit runtime loads and passes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TypeProto, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from onnxpar.graph.checker import newest_ir, newest_opset
from onnxpar.runtime.session.tensors import dtype_of, view_of

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")
MAX_IR, MAX_OPSET = newest_ir(), newest_opset()
"""What the runtime loads; of some ops in it, it has only an older kernel."""
os.environ["ALLOW_RELEASED_ONNX_OPSET_ONLY"] = "0"

Feeds = Mapping[str, Any]


@dataclass(frozen=True)
class PeerCase:
    """A model with feeds, the outputs that its author expects, and his tolerance."""

    name: str
    model: ModelProto
    data: Sequence[tuple[Feeds, Sequence[Any]]]
    rtol: float
    atol: float

    def check(self, expected: Sequence[Any], outputs: Sequence[Any]) -> str | None:
        """What is wrong with outputs, by the suite's own comparison; None where nothing is."""
        return _difference(expected, outputs, self.rtol, self.atol)

    def is_rounded(self, expected: Sequence[Any], outputs: Sequence[Any]) -> bool:
        """Whether outputs of float16 are off by no more than two units in the last place, as the
        suite itself allows for bfloat16: a sum of parts is rounded once more. Where terms cancel,
        half a unit of the largest element comes on top: it tells how large the terms are."""
        if not any(getattr(value, "dtype", None) == np.float16 for value in expected):
            return False
        rtol = max(self.rtol, 2**-9)
        return all(
            _difference([wanted], [found], rtol, max(self.atol, _largest(wanted) * 2**-11)) is None
            for wanted, found in zip(expected, outputs, strict=True)
        )


def _largest(value: Any) -> float:
    """The largest magnitude of a tensor of float16; 0 of anything else."""
    if getattr(value, "dtype", None) != np.float16:
        return 0.0
    return float(np.abs(value[np.isfinite(value)]).max(initial=0))


def _difference(expected: Any, outputs: Any, rtol: float, atol: float) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Runner.assert_similar_outputs(expected, outputs, rtol, atol)
    except (AssertionError, TypeError, AttributeError) as error:
        return " ".join(str(error).split())[:300]
    return None


@cache
def all_cases() -> tuple[PeerCase, ...]:
    """Every case that is at hand, in the suite's order; those of models need the network."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(_read(test) for kind in KINDS for test in load_model_tests(kind=kind))


def _read(test: Any) -> PeerCase:
    if test.model is not None:
        names = [i.name for i in test.model.graph.input]
        data = [
            (dict(zip(names, map(_array, inputs), strict=False)), list(map(_array, outputs)))
            for inputs, outputs in test.data_sets
        ]
        return PeerCase(test.name, test.model, data, test.rtol, test.atol)
    folder = Path(test.model_dir)
    model = onnx.load(folder / "model.onnx")
    sets = [_read_set(model, f) for f in sorted(folder.glob("test_data_set*"))]
    return PeerCase(test.name, model, sets, test.rtol, test.atol)


def _read_set(model: ModelProto, folder: Path) -> tuple[Feeds, list[Any]]:
    inputs = {
        port.name: _read_value(folder / f"input_{i}.pb", port.type)
        for i, port in enumerate(model.graph.input)
        if (folder / f"input_{i}.pb").exists()
    }
    outputs = [
        _read_value(folder / f"output_{i}.pb", port.type)
        for i, port in enumerate(model.graph.output)
    ]
    return inputs, outputs


def _read_value(file: Path, type_: TypeProto) -> Any:
    data = file.read_bytes()
    if type_.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if type_.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return numpy_helper.to_array(onnx.TensorProto.FromString(data))


def _array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def runnable(case: PeerCase) -> PeerCase | str:
    """The case as the unsplit runtime passes it, restamped where it must be; else the reason."""
    own = next((o.version for o in case.model.opset_import if o.domain in ("", "ai.onnx")), 1)
    problem = ""
    for opset in dict.fromkeys([min(own, MAX_OPSET), own, min(own, 26)]):
        stamped = _stamped(case, opset)
        found = _unsplit_problem(stamped)
        if found is None:
            return stamped
        problem = problem or found
    return problem


def _stamped(case: PeerCase, opset: int) -> PeerCase:
    model = ModelProto()
    model.CopyFrom(case.model)
    model.ir_version = min(model.ir_version, MAX_IR)
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = opset
    for port in model.graph.input:
        _bind(port, [feeds.get(port.name) for feeds, _ in case.data])
    return replace(case, model=model)


def _bind(port: onnx.ValueInfoProto, values: Sequence[Any]) -> None:
    """Gives an input the sizes of what it is fed, where they are open."""
    shapes = {value.shape for value in values if isinstance(value, np.ndarray)}
    if port.type.HasField("tensor_type") and len(shapes) == 1:
        element = port.type.tensor_type.elem_type
        (shape,) = shapes
        port.CopyFrom(onnx.helper.make_tensor_value_info(port.name, element, shape))


def _unsplit_problem(case: PeerCase) -> str | None:
    try:
        session = unsplit_session(case.model)
        for feeds, expected in case.data:
            problem = case.check(expected, run_session(session, feeds))
            if problem:
                return f"the unsplit runtime gives other values: {problem}"
    except Exception as error:  # whatever the runtime cannot do with a case that is not ours
        return f"the unsplit runtime fails: {' '.join(str(error).split())[:200]}"
    return None


def unsplit_session(model: ModelProto) -> ort.InferenceSession:
    """A session of one thread for the whole model."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def run_session(session: ort.InferenceSession, feeds: Feeds) -> list[Any]:
    """The session's outputs; tensors of types that NumPy lacks go through OrtValues."""
    if not any(_is_foreign(port.type) for port in (*session.get_inputs(), *session.get_outputs())):
        return list(session.run(None, dict(feeds)))
    values = {name: _ort_value(value) for name, value in feeds.items()}
    outputs = session.run_with_ort_values([o.name for o in session.get_outputs()], values)
    return [_numpy(value) for value in outputs]


def _is_foreign(type_: str) -> bool:
    return "float8" in type_ or "bfloat16" in type_


def _ort_value(value: Any) -> ort.OrtValue:
    if not isinstance(value, np.ndarray):
        return ort.OrtValue.ortvalue_from_numpy(np.asarray(value))
    if value.dtype.isbuiltin == 1:
        return ort.OrtValue.ortvalue_from_numpy(value)
    element = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(value), element)


def _numpy(value: ort.OrtValue) -> Any:
    if not value.is_tensor() or not _is_foreign(value.data_type()):
        return value.numpy()
    dtype = dtype_of(value.data_type())
    assert dtype is not None
    return view_of(value, dtype).copy()
