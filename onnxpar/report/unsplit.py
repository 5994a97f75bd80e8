"""Runs the unsplit model in a stock onnxruntime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar.base.arrays import Array
from onnxpar.base.custom_ops import quiet_options, remedy
from onnxpar.base.errors import InputError, ModelError
from onnxpar.load.kept_bounds import DROPPING, drops_bounds
from onnxpar.load.kept_ranges import SLICING, takes_ranges
from onnxpar.report.sensitivity import ORT_ERRORS, read_model
from onnxpar.runtime.session.options import keep_double
from onnxpar.runtime.session.ort_session import load_ort_session
from onnxpar.runtime.session.tensors import as_fed, bind_input, dtype_of, memory_of, view_of
from onnxpar.runtime.session.values import is_optional, is_value


class Unsplit:
    """The unsplit model in an onnxruntime session. Errors: ModelError if it does not load."""

    def __init__(
        self, model: str | os.PathLike[str] | bytes, folder: str | os.PathLike[str] | None = None
    ) -> None:
        """`folder` is where the external data is, if `model` is bytes."""
        self._session: ort.InferenceSession | None = open_unsplit(model, folder)

    def close(self) -> None:
        """Frees the memory of the session."""
        self._session = None

    def run(self, feeds: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
        """Runs the model, and returns its outputs by name: all, or those in `names`. Errors:
        ModelError, InputError."""
        session = self._session
        assert session is not None, "closed"
        ports = [*session.get_inputs(), *session.get_outputs()]
        for argument in session.get_inputs():
            if argument.name not in feeds and not is_optional(argument.type):
                raise InputError(f"input {argument.name!r} of the unsplit model is not fed")
        try:
            if any(is_value(port.type) for port in ports):
                return _run_values(session, feeds, names)
            return _run_bound(session, feeds, names)
        except ORT_ERRORS as error:
            raise ModelError(f"the unsplit model does not run on these feeds: {error}") from error


def run_unsplit(model: str | os.PathLike[str] | bytes, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a model once, and returns its outputs by name. Errors: ModelError, InputError."""
    return Unsplit(model).run(feeds)


def open_unsplit(
    model: str | os.PathLike[str] | bytes, folder: str | os.PathLike[str] | None = None
) -> ort.InferenceSession:
    """Returns an onnxruntime session of the unsplit model that prints no warnings (such as of
    initializers that are inputs), and leaves out optimizations that change results (see
    `kept_bounds` and `kept_ranges`). `folder` is where the external data is, if `model` is bytes.
    Errors: ModelError."""
    source = model if isinstance(model, bytes) else os.fspath(model)
    options = quiet_options()
    if folder is not None:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, os.fspath(Path(folder).resolve()))
    proto = read_model(model)
    disabled = DROPPING * drops_bounds(proto) + SLICING * takes_ranges(proto)

    def opened() -> ort.InferenceSession:
        return load_ort_session(source, options, disabled, providers=["CPUExecutionProvider"])

    try:
        session = opened()
        fed = (*session.get_inputs(), *session.get_overridable_initializers())
        ports = (fed, session.get_outputs())
        if keep_double(options, *([dtype_of(p.type) for p in each] for each in ports)):
            session = opened()
    except ORT_ERRORS as error:
        raise ModelError(
            f"onnxruntime does not load the unsplit model: {error}{remedy(str(error))}"
        ) from error
    return session


def _run_values(
    session: ort.InferenceSession, feeds: Mapping[str, Any], chosen: Sequence[str] | None
) -> dict[str, Any]:
    values = {n: as_fed(v) if isinstance(v, np.ndarray) else v for n, v in feeds.items()}
    all_names = dict.fromkeys(argument.name for argument in session.get_outputs())
    names = list(chosen or all_names)
    return dict(zip(names, session.run(names, values), strict=True))


def _run_bound(
    session: ort.InferenceSession, feeds: Mapping[str, Array], chosen: Sequence[str] | None
) -> dict[str, Array]:
    """Runs the session with inputs and outputs bound to memory; returns outputs by name."""
    binding = session.io_binding()
    held = {name: np.asarray(array, order="C") for name, array in feeds.items()}
    memory = {name: memory_of(array) for name, array in held.items()}
    for argument in (*session.get_inputs(), *session.get_overridable_initializers()):
        if argument.name in held:
            bind_input(binding, argument.name, held[argument.name], memory[argument.name])
    arguments = [
        argument
        for argument in {argument.name: argument for argument in session.get_outputs()}.values()
        if chosen is None or argument.name in chosen
    ]
    for argument in arguments:
        binding.bind_output(argument.name, "cpu")
    session.run_with_iobinding(binding)
    results = {}
    for argument, value in zip(arguments, binding.get_outputs(), strict=True):
        dtype = dtype_of(argument.type)
        if dtype is None:
            raise ModelError(
                f"output {argument.name!r} is a {argument.type}, which cannot be compared"
            )
        results[argument.name] = view_of(value, dtype).copy()
    return results
