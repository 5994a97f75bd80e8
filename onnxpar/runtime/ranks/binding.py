"""Binds the inputs and outputs of an onnxruntime session to memory, and keeps bindings from run to
run where possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnxruntime as ort

from onnxpar.base.arrays import Array
from onnxpar.runtime.session.device import HOST
from onnxpar.runtime.session.tensors import bind_input, bind_output, is_packed, memory_of

Place = tuple[int, tuple[int, ...]]
"""(address, shape) of a bound array. An array at the same place is not bound again, because binding
takes as long as a small run."""


class Binding:
    """The memory to which the inputs and outputs of a session are bound (onnxruntime's
    IOBinding)."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.forget()

    def forget(self) -> None:
        """Starts a new, empty binding."""
        self.native = self._session.io_binding()
        self._held: dict[str, Array] = {}
        self._fed: dict[str, Place] = {}
        self._placed: dict[str, Place] = {}
        self._order: Sequence[str] = ()

    def start(self, outputs: Sequence[str], unfed: Collection[str]) -> None:
        """Prepares a run with these outputs, in order. Starts a new binding if the outputs differ
        from the last run's, or if the last run bound an input that is now in `unfed`: the inputs
        that take their default values."""
        if list(outputs) != self._order or not self._fed.keys().isdisjoint(unfed):
            self.forget()
            self._order = list(outputs)

    def feed(self, name: str, array: Array) -> None:
        """Binds an input to a contiguous array, which the caller keeps alive."""
        if is_packed(array.dtype):
            self._held[name] = memory_of(array)
            bind_input(self.native, name, array, self._held[name])
            self._fed[name] = _place(self._held[name])
            return
        at = _place(array)
        if self._fed.get(name) != at:
            bind_input(self.native, name, array)
            self._fed[name] = at

    def use(self, name: str, value: ort.OrtValue) -> None:
        """Binds an input to a value of onnxruntime, such as a kept state."""
        self._fed.pop(name, None)
        self.native.bind_ortvalue_input(name, value)

    def put(self, name: str, array: Array | None) -> None:
        """Binds an output to a contiguous array; if `array` is None, to new memory of
        onnxruntime."""
        if array is None:
            self._placed.pop(name, None)
            HOST.bind_new_output(self.native, name)
        elif self._placed.get(name) != (at := _place(array)):
            bind_output(self.native, name, array)
            self._placed[name] = at

    def put_value(self, name: str, value: ort.OrtValue) -> None:
        """Binds an output to the memory of a value of onnxruntime, which the run overwrites."""
        self._placed.pop(name, None)
        self.native.bind_ortvalue_output(name, value)

    @property
    def results(self) -> dict[str, ort.OrtValue]:
        """The outputs of the last run, by name."""
        return dict(zip(self._order, self.native.get_outputs(), strict=True))


def _place(array: Array) -> Place:
    return array.ctypes.data, array.shape
