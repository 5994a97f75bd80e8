"""The device whose memory has the ranks' tensors, and whose provider runs the collectives.

A rank's other nodes run on any execution provider, and onnxruntime copies between this memory and
the provider's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

from onnxpar.base.arrays import Array


@dataclass(frozen=True)
class Device:
    """A device, by the names that onnxruntime has for it.

    name      in bindings and OrtValues
    memory    of its allocator
    provider  the execution provider of the collectives' kernels, which `native/op_registry.cc`
              registers
    """

    name: str
    memory: str
    provider: str

    def has(self, device_type: str) -> bool:
        """True if `device_type`, as callers of onnxruntime write it, means this device."""
        return device_type.lower() == self.name

    def allocate(self, shape: Sequence[int], element: Any) -> ort.OrtValue:
        """Returns a new tensor on this device, whose contents are arbitrary."""
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), element, self.name, 0)

    def wrap(self, array: Array) -> ort.OrtValue:
        """Returns a tensor that shares the memory of a contiguous array."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.name, 0)

    def bind_input(
        self, binding: ort.IOBinding, name: str, element: Any, shape: Sequence[int], address: int
    ) -> None:
        """Binds an input to memory of this device at an address."""
        binding.bind_input(name, self.name, 0, element, list(shape), address)

    def bind_output(
        self, binding: ort.IOBinding, name: str, element: Any, shape: Sequence[int], address: int
    ) -> None:
        """Binds an output to memory of this device at an address."""
        binding.bind_output(name, self.name, 0, element, list(shape), address)

    def bind_new_output(self, binding: ort.IOBinding, name: str) -> None:
        """Binds an output to new memory of this device, which onnxruntime allocates in each run."""
        binding.bind_output(name, self.name)

    def memory_info(self) -> ort.OrtMemoryInfo:
        """Returns onnxruntime's description of this device's memory."""
        kind = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
        return ort.OrtMemoryInfo(self.memory, kind, 0, ort.OrtMemType.DEFAULT)


HOST = Device("cpu", "Cpu", "CPUExecutionProvider")
"""The host's memory, in which all ranks have their tensors."""
