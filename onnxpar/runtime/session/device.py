"""The device of the ranks' tensors: its memory, and the provider that runs the collectives.

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
    """A device.

    name      onnxruntime's word for it, in bindings and OrtValues
    memory    onnxruntime's word for its allocator
    provider  the execution provider of the collectives' kernels; `native/op_registry.cc` registers
              them
    """

    name: str
    memory: str
    provider: str

    def has(self, device_type: str) -> bool:
        """True if memory on a device of this type is memory of this device."""
        return device_type.lower() == self.name

    def allocate(self, shape: Sequence[int], element: Any) -> ort.OrtValue:
        """Returns a new tensor with any contents."""
        return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), element, self.name, 0)

    def wrap(self, array: Array) -> ort.OrtValue:
        """Returns a tensor over the memory of a contiguous array."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.name, 0)

    def bind_input(
        self, binding: ort.IOBinding, name: str, element: Any, shape: Sequence[int], address: int
    ) -> None:
        """Binds an input to memory of this device."""
        binding.bind_input(name, self.name, 0, element, list(shape), address)

    def bind_output(
        self, binding: ort.IOBinding, name: str, element: Any, shape: Sequence[int], address: int
    ) -> None:
        """Binds an output to memory of this device."""
        binding.bind_output(name, self.name, 0, element, list(shape), address)

    def bind_new_output(self, binding: ort.IOBinding, name: str) -> None:
        """Binds an output to new memory of this device, which onnxruntime allocates in each run."""
        binding.bind_output(name, self.name)

    def memory_info(self) -> ort.OrtMemoryInfo:
        """Returns onnxruntime's description of the memory."""
        kind = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
        return ort.OrtMemoryInfo(self.memory, kind, 0, ort.OrtMemType.DEFAULT)


HOST = Device("cpu", "Cpu", "CPUExecutionProvider")
"""The memory of the host, in which all ranks have their tensors."""
