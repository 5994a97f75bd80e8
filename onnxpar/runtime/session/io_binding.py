"""onnxruntime's IOBinding for a sharded model: bound tensors are global, not shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from onnxpar.base.errors import InputError
from onnxpar.runtime.session.checks import check_array
from onnxpar.runtime.session.device import HOST
from onnxpar.runtime.session.ort_values import Memory, array_of, element_dtype, ort_value_of

if TYPE_CHECKING:
    from onnxpar.runtime.session.session import Session


class IOBinding(ort.IOBinding):  # type: ignore[misc]
    """The memory to which the inputs and outputs of a session are bound, from run to run.

    Inputs are read when a run begins, so their values may change between runs. An output can be
    bound to memory of its dtype and shape. Errors: InputError, naming the input or output.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._fed: dict[str, Any] = {}
        self._targets: dict[str, Memory | ort.OrtValue | None] = {}
        self._results: dict[str, Any] | None = None

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Binds an array as an input, without a copy."""
        port = self._input(name)
        self._fed[name] = arr_on_cpu if port.is_value else check_array(port, arr_on_cpu)

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Any,
        buffer_ptr: int,
    ) -> None:
        """Binds an input to CPU memory at an address, which the caller must keep alive."""
        port = self._input(name)
        _check_device(name, device_type)
        memory = Memory.of(element_type, shape, buffer_ptr)
        check_array(port, np.broadcast_to(np.zeros((), memory.dtype), memory.shape))
        self._fed[name] = memory

    def bind_ortvalue_input(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Binds an OrtValue as an input; its values are read when a run begins."""
        check_array(self._input(name), ortvalue)
        self._fed[name] = ortvalue

    def synchronize_inputs(self) -> None:
        """Does nothing: CPU memory needs no synchronization."""

    def bind_output(
        self,
        name: str,
        device_type: str = HOST.name,
        device_id: int = 0,
        element_type: Any = None,
        shape: Any = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Requests an output. With `buffer_ptr`, it is written to the CPU memory at that address,
        of `shape` and `element_type`; without, to new memory."""
        self._check_output(name)
        _check_device(name, device_type)
        target = None
        if buffer_ptr is not None:
            if element_type is None or shape is None:
                raise InputError(f"output {name!r}: give element_type and shape of the memory, too")
            self._check_dtype(name, element_dtype(element_type))
            target = Memory.of(element_type, shape, buffer_ptr)
        self._targets[name] = target
        self._results = None

    def bind_ortvalue_output(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Requests an output, written to the memory of an OrtValue."""
        self._check_output(name)
        self._check_dtype(name, array_of(ortvalue).dtype)
        self._targets[name] = ortvalue
        self._results = None

    def synchronize_outputs(self) -> None:
        """Does nothing: a run returns after all outputs are written."""

    def get_outputs(self) -> list[ort.OrtValue]:
        """Returns the outputs of the last run, in the order in which they were bound."""
        return [self._value(name, result) for name, result in self._last().items()]

    def get_outputs_as_ortvaluevector(self) -> Any:
        """Returns copies of the outputs of the last run, in onnxruntime's vector."""
        vector = ort.capi._pybind_state.OrtValueVector()
        for name, result in self._last().items():
            vector.push_back(ort_value_of(name, result, own=True)._ortvalue)
        return vector

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Returns copies of the outputs of the last run, in the order in which they were bound."""
        return [r.copy() if isinstance(r, np.ndarray) else r for r in self._last().values()]

    def clear_binding_inputs(self) -> None:
        """Unbinds all inputs."""
        self._fed.clear()

    def clear_binding_outputs(self) -> None:
        """Unbinds all outputs."""
        self._targets.clear()
        self._results = None

    @property
    def outputs(self) -> list[str]:
        """The names of the bound outputs. Errors: InputError if there are none."""
        if not self._targets:
            raise InputError("no output is bound; call bind_output(name) first")
        return list(self._targets)

    def feeds(self) -> dict[str, Any]:
        """Returns the current values of bound inputs, by name."""
        return {n: v.read() if isinstance(v, Memory) else v for n, v in self._fed.items()}

    def take(self, results: list[Any]) -> None:
        """Called with the results of a run: writes them to the memory bound for them. Errors:
        InputError, before anything is written, if one does not fit."""
        named = dict(zip(self._targets, results, strict=True))
        for name, result in named.items():
            self._check_fits(name, result)
        for name, result in named.items():
            target = self._targets[name]
            if isinstance(target, Memory):
                target.write(result)
            elif target is not None:
                _memory_of(target).write(result)
        self._results = named

    def _last(self) -> dict[str, Any]:
        """The results of the last run, by name. Errors: InputError if there was none with these
        outputs."""
        if self._results is None:
            raise InputError("nothing was run with these outputs; call run_with_iobinding first")
        return self._results

    def _value(self, name: str, result: Any) -> ort.OrtValue:
        """Returns an output as an OrtValue: the bound OrtValue, or a new one over the bound memory
        or over the result."""
        target = self._targets[name]
        if target is not None and not isinstance(target, Memory):
            return target
        if isinstance(target, Memory) and target.dtype.isbuiltin == 1:
            return ort_value_of(name, target.read())
        return ort_value_of(name, result)

    def _input(self, name: str) -> Any:
        """The port of an input. Errors: InputError for an unknown name."""
        inputs = self._session._bundle.inputs
        if name not in inputs:
            raise InputError(f"no input is named {name!r}; the inputs are {', '.join(inputs)}")
        return inputs[name]

    def _check_output(self, name: str) -> None:
        outputs = self._session._bundle.outputs
        if name not in outputs:
            raise InputError(f"no output is named {name!r}; the outputs are {', '.join(outputs)}")

    def _check_dtype(self, name: str, dtype: np.dtype[Any]) -> None:
        port = self._session._bundle.outputs[name]
        if port.dtype != dtype or port.dtype.kind == "O":
            raise InputError(f"output {name!r} is {port.expects()}; bind memory of {port.dtype}")

    def _check_fits(self, name: str, result: Any) -> None:
        target = self._targets[name]
        if target is None:
            return
        shape = target.shape if isinstance(target, Memory) else tuple(target.shape())
        if shape != result.shape:
            raise InputError(
                f"output {name!r} has the shape {list(result.shape)}, but the memory bound to it "
                f"is for {list(shape)}; bind memory of that shape, or bind_output({name!r}) alone"
            )


def _memory_of(value: ort.OrtValue) -> Memory:
    """Returns the memory of an OrtValue that is a tensor of numbers."""
    shape = tuple(value.shape())
    return Memory.of(value.element_type(), shape, value.data_ptr() if 0 not in shape else 0)


def _check_device(name: str, device_type: str) -> None:
    if not HOST.has(device_type):
        raise InputError(f"{name!r} is bound on {device_type}: the ranks use CPU memory only")


def answer_for_sharded_sessions() -> None:
    """Makes `onnxruntime.IOBinding(session)` return an IOBinding of this module if the session has
    a sharded model. Optimum and others create bindings this way, and onnxruntime has no other hook
    for it."""

    def new(cls: type, session: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = isinstance(session, ort.InferenceSession) and hasattr(session, "_bundle")
        return object.__new__(IOBinding if sharded else cls)

    ort.IOBinding.__new__ = staticmethod(new)
