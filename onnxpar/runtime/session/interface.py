"""The methods of onnxruntime's InferenceSession other than `run`, for a sharded model; methods that
make no sense for one raise an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import onnxruntime as ort

from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.runtime.session.device import HOST
from onnxpar.runtime.session.io_binding import IOBinding, answer_for_sharded_sessions
from onnxpar.runtime.session.metadata import ModelMetadata
from onnxpar.runtime.session.ort_values import element_dtype, ort_value_of

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from onnxpar.base.arrays import Array
    from onnxpar.runtime.ranks.ranks import Ranks
    from onnxpar.runtime.session.bundle import Bundle

Callback = Callable[[Sequence[Any], Any, str], object]
answer_for_sharded_sessions()


class _NoSession:
    """Stands in place of the native session, which a sharded model does not have: any attribute
    raises an InputError."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(
            f"{name} is not available for a sharded model, which has a session on each rank; use "
            "run, run_with_iobinding or run_async, or run the unsplit model"
        )


class Interface(ort.InferenceSession):  # type: ignore[misc]
    """Base of sessions of a sharded model. It is a subclass of onnxruntime's session, because
    libraries check for that class or read `_sess`; but onnxruntime's `__init__` is not called. A
    method that a later onnxruntime adds raises the error of `_NoSession`."""

    _bundle: Bundle
    _ranks: Ranks
    _lock: threading.RLock

    def __init__(self, sess_options: ort.SessionOptions | None = None) -> None:
        self._sess = _NoSession()
        self._enable_fallback = False
        self._model_path = str(self._bundle.path)
        self._model_bytes = None
        self._sess_options = sess_options or ort.SessionOptions()
        self._pool: ThreadPoolExecutor | None = None

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: ort.RunOptions | None = None,
        *,
        keep_states: bool = False,
    ) -> list[Array]:
        """Runs all ranks; returns the named outputs (None: all) as global arrays. See
        `Session.run`."""
        raise NotImplementedError

    def _names(self, output_names: Sequence[str] | None) -> list[str]:
        """Returns the names of the requested outputs; if there are none, all outputs except the
        outputs of the evaluation program."""
        apart = self._bundle.apart
        return list(output_names or (n for n in self._bundle.outputs if n not in apart))

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callback,
        user_data: Any,
        run_options: ort.RunOptions | None = None,
    ) -> None:
        """Returns at once. A thread of the session runs the calls in order, and then calls
        `callback(results, user_data, error)`: with an empty `error`, or with empty `results`."""
        with self._lock:
            self._ranks.check_usable()
            if self._pool is None:
                from concurrent.futures import ThreadPoolExecutor

                self._pool = ThreadPoolExecutor(1, thread_name_prefix="onnxpar-run")
            self._pool.submit(
                self._run_then, output_names, dict(input_feed), callback, user_data, run_options
            )

    def _run_then(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callback,
        user_data: Any,
        run_options: ort.RunOptions | None,
    ) -> None:
        """Runs, and passes the results or the error's text to the callback."""
        results: Sequence[Any] = []
        problem = ""
        try:
            results = self.run(output_names, input_feed, run_options)
        except OnnxparError as error:
            problem = str(error)
        except Exception as error:  # only the callback can report it to the user
            problem = f"{type(error).__name__}: {error}"
        try:
            callback(results, user_data, problem)
        except Exception:  # an error of the user's code, in a thread that nobody waits for
            import traceback

            traceback.print_exc()

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, ort.OrtValue],
        run_options: ort.RunOptions | None = None,
    ) -> list[ort.OrtValue]:
        """Runs with OrtValues in CPU memory as inputs; returns the outputs as OrtValues."""
        names = self._names(output_names)
        results = self.run(names, input_dict_ort_values, run_options)
        return [ort_value_of(name, result) for name, result in zip(names, results, strict=True)]

    def run_with_ortvaluevector(
        self,
        run_options: ort.RunOptions | None,
        feed_names: Sequence[str],
        feeds: Sequence[Any],
        fetch_names: Sequence[str],
        fetches: Any,
        fetch_devices: Sequence[Any],
    ) -> None:
        """Runs with onnxruntime's vectors of values; appends the outputs to `fetches`, which must
        be empty."""
        if len(fetches):
            raise InputError("fetches has values already; give an empty OrtValueVector")
        results = self.run(fetch_names, dict(zip(feed_names, feeds, strict=True)), run_options)
        for name, result in zip(fetch_names, results, strict=True):
            fetches.push_back(ort_value_of(name, result, own=True)._ortvalue)

    def io_binding(self) -> IOBinding:
        """Returns a new binding of inputs and outputs to memory, which lasts from run to run."""
        return IOBinding(self)

    def run_with_iobinding(
        self,
        iobinding: IOBinding,
        run_options: ort.RunOptions | None = None,
        *,
        keep_states: bool = False,
    ) -> None:
        """Runs with the inputs bound in `iobinding`, and writes outputs to their bound memory.
        Errors: those of `run`; InputError if the binding belongs to another session, or if the
        memory of an output does not fit."""
        if not isinstance(iobinding, IOBinding) or iobinding._session is not self:
            raise InputError("the binding is of another session; make one with io_binding()")
        with self._lock:
            names, feeds = iobinding.outputs, iobinding.feeds()
            iobinding.take(self.run(names, feeds, run_options, keep_states=keep_states))

    def get_session_options(self) -> ort.SessionOptions:
        """Returns the options of the session."""
        return self._sess_options

    def get_modelmeta(self) -> ModelMetadata:
        """Returns the metadata of the unsplit model."""
        return ModelMetadata.of(self._bundle.data)

    def get_providers(self) -> list[str]:
        """Returns the execution providers of rank 0, by priority."""
        return list(self._ranks.facts["providers"])

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Returns the options of each execution provider of rank 0."""
        return {name: dict(o) for name, o in self._ranks.facts["provider_options"].items()}

    def get_profiling_start_time_ns(self) -> int:
        """Returns the time when rank 0 began to record, in nanoseconds of onnxruntime's clock; 0 if
        it does not record."""
        return int(self._ranks.facts["profiling_start_ns"])

    def set_providers(
        self,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """Changes the execution providers of all ranks. This class always raises an InputError; a
        session that can restart its ranks overrides this."""
        raise InputError("this session cannot change its providers; make another")

    def disable_fallback(self) -> None:
        """Does nothing: ranks never fall back to other providers."""

    def enable_fallback(self) -> None:
        """Always raises an InputError: ranks cannot fall back to other providers."""
        raise InputError(
            "a rank cannot fall back to other providers while the others wait for it; choose "
            "providers with set_providers or providers="
        )

    def get_input_memory_infos(self) -> list[Any]:
        """Returns onnxruntime's description of CPU memory, once for each input."""
        return [HOST.memory_info() for _ in self.get_inputs()]

    def get_output_memory_infos(self) -> list[Any]:
        """Returns onnxruntime's description of CPU memory, once for each output."""
        return [HOST.memory_info() for _ in self.get_outputs()]

    def get_input_epdevices(self) -> list[Any]:
        """Returns onnxruntime's description of the CPU, once for each input. Errors: InputError if
        this version of onnxruntime has none."""
        if not hasattr(ort, "get_ep_devices"):
            raise InputError(
                "this version of onnxruntime does not list devices; install a newer one"
            )
        devices = [d for d in ort.get_ep_devices() if d.ep_name == HOST.provider]
        return [device for _ in self.get_inputs() for device in devices[:1]]

    def create_ortvalue_from_shape_and_type(
        self,
        shape: Sequence[int],
        element_type: Any,
        device_type: str,
        device_id: int = 0,
        vendor_id: int = -1,
    ) -> ort.OrtValue:
        """Returns a new OrtValue in CPU memory, for example to bind. Ranks on this host read it in
        place: a run copies only shards that are not contiguous in it. Errors: InputError for other
        devices."""
        if not HOST.has(device_type):
            raise InputError(f"memory on {device_type}: the ranks use CPU memory only")
        dtype = element_dtype(element_type)
        if dtype.isbuiltin == 1 and dtype.kind in "biufc":
            with self._lock:
                memory = self._ranks.memory(dtype, tuple(map(int, shape)))
            return HOST.wrap(memory)
        return HOST.allocate(shape, element_type)

    def release_captured_graph(self, graph_annotation_id: int = 0) -> None:
        """Does nothing: CPU sessions capture no graphs."""

    def get_tuning_results(self) -> list[Any]:
        """Returns an empty list: CPU providers tune nothing."""
        return []

    def set_tuning_results(self, results: Sequence[Any], *, error_on_invalid: bool = False) -> None:
        """Raises an InputError for any result: the ranks' providers accept none."""
        if results:
            raise InputError("the providers of the ranks accept no tuning results; leave them out")

    def set_ep_dynamic_options(self, options: Mapping[str, str]) -> None:
        """Raises an InputError for any option: the ranks' providers accept none."""
        if options:
            raise InputError(
                f"the ranks' providers accept no dynamic options ({', '.join(options)}); give "
                "provider_options when the session is made"
            )

    def get_provider_graph_assignment_info(self) -> list[Any]:
        """Always raises an InputError: each rank has a graph of its own."""
        raise InputError(
            "each rank has a graph of its own; make the session with profile=True, and "
            "end_profile(FILE) shows which node ran where"
        )
