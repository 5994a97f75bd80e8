"""The data that a step reads: the shape of each input, and how samples are joined and filled to
become arrays of these shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.graph.training_spec import IGNORED
from onnxpar.runtime.session.tensors import dtype_of

Chunk = dict[str, Array]
"""An array for each input, by name: some samples, along the dimension that numbers samples; or, for
an input that all samples share, its value."""
Sizes = Sequence[int | None]
"""The sizes of an input; None for the dimension that numbers samples."""


@dataclass(frozen=True)
class Needs:
    """The inputs for which a step needs data.

    ports  the inputs (`NodeArg`s), by name
    dims   the dimension that numbers samples, by name of an input; an input that all samples share
           is not there
    pad    by input, the value that fills samples which are shorter than the step's
    """

    ports: Mapping[str, Any]
    dims: Mapping[str, int]
    pad: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(
        ports: Sequence[Any],
        dims: Mapping[str, int],
        pad: Mapping[str, float] | None = None,
        labels: str | None = None,
    ) -> Needs:
        """Returns the needs of a step. Shorter `labels` are filled with the label that does not
        count, unless `pad` says otherwise. Errors: InputError if `pad` names an input whose samples
        cannot be shorter, or a value that the input cannot have."""
        by_name = {port.name: port for port in ports}
        dims = {name: dims[name] for name in by_name if name in dims}
        may_be_short = [name for name in dims if len(by_name[name].shape) > 1]
        for name, value in (pad or {}).items():
            if name not in may_be_short:
                have = ", ".join(may_be_short) or "none"
                raise InputError(
                    f"--pad {name}={value:g}: the inputs whose samples have a length are {have}"
                )
            dtype = dtype_of(by_name[name].type)
            if dtype is not None:
                converted(np.asarray(value), dtype, f"--pad {name}={value:g}")
        own = {name: float(IGNORED) for name in may_be_short if name == labels}
        return Needs(by_name, dims, {**own, **(pad or {})})

    @property
    def batch(self) -> int:
        """Number of samples in a batch."""
        sizes = [int(self.ports[name].shape[at]) for name, at in self.dims.items()]
        return sizes[0] if sizes else 1

    def sizes(self, name: str) -> Sizes:
        """Returns the sizes of an input; None for the dimension that numbers samples."""
        shape = self.ports[name].shape
        return [None if k == self.dims.get(name) else int(size) for k, size in enumerate(shape)]

    def check_shape(self, name: str, shape: Sequence[int], source: str) -> None:
        """Checks that an array of samples fits an input. `source` names the data in errors. Errors:
        InputError."""
        wanted = self.sizes(name)
        differ = [(w, s) for w, s in zip(wanted, shape, strict=False) if w not in (None, s)]
        is_short = len(shape) == len(wanted) and all(w is not None and s < w for w, s in differ)
        if len(shape) == len(wanted) and (not differ or (is_short and name in self.pad)):
            return
        remedy = f"; fill shorter samples with --pad {name}=VALUE" if is_short else ""
        text = ", ".join("samples" if size is None else str(size) for size in wanted)
        raise InputError(
            f"{source}: the array {name!r} has the shape {list(shape)}; the step needs [{text}]"
            + (remedy if name in self.dims else "")
        )

    def filled(self, name: str, array: Array, source: str) -> Array:
        """Returns samples of an input with the sizes that the step needs: shorter samples are
        filled at their end. `source` names the data in errors. Errors: InputError."""
        self.check_shape(name, array.shape, source)
        sizes = zip(self.sizes(name), array.shape, strict=True)
        widths = [(0, 0 if wanted is None else wanted - size) for wanted, size in sizes]
        if not any(width for _, width in widths):
            return array
        value = np.asarray(self.pad[name]).astype(array.dtype)
        return np.pad(array, widths, constant_values=value)

    def counted(self, shapes: Mapping[str, Sequence[int]], source: str) -> int:
        """Returns the number of samples in arrays of these shapes, by input name. `source` names
        the data in errors. Errors: InputError if an array is missing or does not fit, or if numbers
        of samples differ."""
        check_keys(shapes, self.ports, source)
        for name in self.ports:
            self.check_shape(name, shapes[name], source)
        counts = {name: shapes[name][at] for name, at in self.dims.items()}
        if len(set(counts.values())) > 1:
            text = ", ".join(f"{n} of {name!r}" for name, n in counts.items())
            raise InputError(
                f"{source}: the arrays must have equal numbers of samples, but have {text}"
            )
        return next(iter(counts.values()), 0)

    def chunk(self, values: Mapping[str, Any], source: str) -> Chunk:
        """Returns arrays for all inputs from samples that are given, for each input, as an array or
        as a list of samples. `source` names the data in errors. Errors: InputError."""
        check_keys(values, self.ports, source)
        arrays = {name: self._whole(name, values[name], source) for name in self.ports}
        self.counted({name: array.shape for name, array in arrays.items()}, source)
        return arrays

    def _whole(self, name: str, value: Any, source: str) -> Array:
        """Returns the array of one input from an array or a list of samples."""
        if _is_list(value) and self.dims.get(name) == 0:
            return self._stack(name, value, [f"{source}: sample {i}" for i in range(len(value))])
        return self.filled(name, self._array(name, value, source), source)

    def stacked(self, samples: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> Chunk:
        """Returns arrays for all inputs from single samples, each a mapping from input names to
        values. An input that all samples share gets the value of the first sample. `sources` has a
        name for each sample, for errors. Errors: InputError."""
        for sample, source in zip(samples, sources, strict=True):
            check_keys(sample, self.ports, source)
        arrays = {}
        for name in self.ports:
            if name in self.dims:
                arrays[name] = self._stack(name, [sample[name] for sample in samples], sources)
            else:
                array = self._array(name, samples[0][name], sources[0])
                arrays[name] = self.filled(name, array, sources[0])
        return arrays

    def _stack(self, name: str, values: Sequence[Any], sources: Sequence[str]) -> Array:
        """Returns the array of one input from the values of single samples."""
        at, rows = self.dims[name], []
        for value, source in zip(values, sources, strict=True):
            array = self._array(name, value, source)
            one = array.reshape((*array.shape[:at], 1, *array.shape[at:]))
            rows.append(self.filled(name, one, source))
        return np.concatenate(rows, at) if rows else np.zeros([n or 0 for n in self.sizes(name)])

    def _array(self, name: str, value: Any, source: str) -> Array:
        """Returns a value as an array. A value without a dtype (Python's numbers and lists) gets
        the input's dtype. Errors: InputError."""
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:  # the latter are torch's
            raise InputError(f"{source}: {name!r} is no array: {error}") from None
        dtype = dtype_of(self.ports[name].type)
        if hasattr(value, "dtype") or dtype is None:
            return array
        return converted(array, dtype, f"{source}: {name!r}")

    def is_sample(self, values: Mapping[str, Any]) -> bool:
        """True if values by input name are one sample, not a batch: each has one dimension less
        than the input."""
        return all(_depth(values[n]) == len(self.ports[n].shape) - 1 for n in self.dims)

    def count(self, chunk: Chunk) -> int:
        """Returns the number of samples in a chunk."""
        name, at = next(iter(self.dims.items()))
        return int(chunk[name].shape[at])

    def take(self, chunk: Chunk, rows: Array) -> Chunk:
        """Returns a copy of the samples with the numbers `rows`."""
        return {
            name: np.take(array, rows, self.dims[name]) if name in self.dims else array
            for name, array in chunk.items()
        }

    def joined(self, chunks: Sequence[Chunk]) -> Chunk:
        """Returns the samples of several chunks as one chunk."""
        if len(chunks) == 1:
            return chunks[0]
        parts = {name: [chunk[name] for chunk in chunks] for name in chunks[0]}
        return {
            name: np.concatenate(each, self.dims[name]) if name in self.dims else each[0]
            for name, each in parts.items()
        }


def check_keys(values: Any, names: Mapping[str, Any], source: str) -> None:
    """Checks that values are a mapping with an entry for each input in `names`. `source` names the
    data in errors. Errors: InputError."""
    if not isinstance(values, Mapping):
        raise InputError(
            f"{source} is a {type(values).__name__}; give a dict of arrays by input name: "
            f"{', '.join(names)}"
        )
    for name in names:
        if name not in values:
            have = ", ".join(sorted(map(str, values)))
            raise InputError(f"{source} has no array for the input {name!r}; its arrays: {have}")


def converted(array: Array, dtype: np.dtype[Any], what: str) -> Array:
    """Returns numbers in another dtype; `what` names them in errors. Errors: InputError if this
    changes them by more than the rounding of floats."""
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf":
        raise InputError(f"{what} has the type {array.dtype.name}; the step needs {dtype.name}")
    with np.errstate(invalid="ignore", over="ignore"):
        result = array.astype(dtype)
    if dtype.kind in "biu" and not (result == array).all():
        raise InputError(f"{what} has numbers that {dtype.name} cannot hold")
    return result


def _depth(value: Any) -> int:
    """Returns the number of dimensions of an array, or of nested lists, whose lengths may
    differ."""
    if _is_list(value):
        return 1 + (_depth(value[0]) if len(value) else 0)
    return int(getattr(value, "ndim", 0))


def _is_list(value: Any) -> bool:
    """True for a list, a tuple, or an array of objects, which serves as a list."""
    is_objects = isinstance(value, np.ndarray) and value.dtype.kind == "O" and value.ndim == 1
    return is_objects or isinstance(value, list | tuple)
