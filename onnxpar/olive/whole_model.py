"""A sharded model in the form in which Olive sees an unsplit one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort
from olive.model import DistributedOnnxModelHandler, ONNXModelHandler

from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import InferenceSession


class WholeModelHandler(ONNXModelHandler):  # type: ignore[misc]
    """A handler of a sharded model whose sessions run all ranks on this host. It has the inputs and
    outputs of the unsplit model, so Olive measures it like an unsplit model."""

    def __init__(self, sharded: DistributedOnnxModelHandler) -> None:
        """Errors: ModelError if the files are not a sharded model's."""
        super().__init__(
            model_path=sharded.model_path,
            onnx_file_name=sharded.ranked_model_name(0),
            inference_settings=sharded.inference_settings,
            use_ort_extensions=sharded.use_ort_extensions,
            model_attributes=sharded.model_attributes,
        )
        self._folder = Path(sharded.model_path)
        self._bundle = Bundle.load(self._folder)
        self._sessions: list[InferenceSession] = []

    @property
    def size_on_disk(self) -> int:
        """The bytes of all files of all ranks."""
        return sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())

    @property
    def io_config(self) -> dict[str, list[Any]]:
        """Names, shapes and types of the unsplit model's inputs and outputs."""
        ports = {"input": self._bundle.inputs.values(), "output": self._bundle.outputs.values()}
        config: dict[str, list[Any]] = {}
        for kind, each in ports.items():
            config[f"{kind}_names"] = [port.name for port in each]
            config[f"{kind}_shapes"] = [list(port.arg.shape) for port in each]
            config[f"{kind}_types"] = [port.dtype.name for port in each]
        return config

    def prepare_session(
        self,
        inference_settings: Mapping[str, Any] | None = None,
        device: Any = None,
        execution_providers: str | list[str] | None = None,
        rank: int | None = None,
    ) -> InferenceSession:
        """Starts the ranks, and returns a session of them; `close` ends it. `rank` and `device` are
        not used. Errors: OnnxparError if the ranks do not start."""
        settings = self.merge_inference_settings(inference_settings, execution_providers)
        session = InferenceSession(
            self._folder,
            _session_options(settings.get("session_options") or {}),
            settings["execution_provider"],
            settings["provider_options"],
            libraries=_extensions() if self.use_ort_extensions else (),
        )
        self._sessions.append(session)
        return session

    def close(self) -> None:
        """Ends the ranks of all sessions."""
        while self._sessions:
            self._sessions.pop().close()


def _session_options(settings: Mapping[str, Any]) -> ort.SessionOptions:
    """Returns onnxruntime's options from the dict `session_options` of Olive."""
    made = ort.SessionOptions()
    for name in ("inter_op_num_threads", "intra_op_num_threads", "log_severity_level"):
        if settings.get(name) is not None:
            setattr(made, name, settings[name])
    if settings.get("execution_mode") is not None:
        made.execution_mode = ort.ExecutionMode(settings["execution_mode"])
    if settings.get("graph_optimization_level") is not None:
        level = ort.GraphOptimizationLevel(settings["graph_optimization_level"])
        made.graph_optimization_level = level
    for key, value in (settings.get("extra_session_config") or {}).items():
        made.add_session_config_entry(key, value)
    return made


def _extensions() -> tuple[str]:
    """Returns the path of the library of onnxruntime-extensions, in a tuple."""
    from onnxruntime_extensions import get_library_path

    return (get_library_path(),)
