"""Parquet files of training data: a column for each input, a row for each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.base.unreadable import cannot_read
from onnxpar.runtime.session.tensors import dtype_of
from onnxpar.trainer.needs import Needs, check_keys, converted
from onnxpar.trainer.sources import Shard, Shards, Take, check_unchanged, digest_of_files

SUFFIX = ".parquet"


def parquet_shards(files: Sequence[Path], needs: Needs) -> Shards:
    """Returns the samples of Parquet files; each row group is a shard. Errors: InputError, also if
    pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise InputError(
            f"{files[0]} needs pyarrow; install it with: pip install 'onnxpar[parquet]'"
        ) from None
    shards = []
    for file in files:
        names, counts = _read(file, _described)
        check_keys(dict.fromkeys(names), needs.ports, str(file))
        for group, count in enumerate(counts):
            if count:
                shards.append(Shard(count, partial(_open, file, group, count, needs)))
    return Shards(shards, lambda: digest_of_files(files, files[0].parent, needs))


def _described(parquet: Any) -> tuple[list[str], list[int]]:
    """Returns the names of a file's columns, and the number of rows of each row group."""
    groups = range(parquet.num_row_groups)
    return parquet.schema_arrow.names, [parquet.metadata.row_group(i).num_rows for i in groups]


def _open(file: Path, group: int, count: int, needs: Needs) -> Take:
    """Reads row group `group`, of `count` rows, of a file. Returns the function that takes samples
    by number. Errors: InputError that names the file and the column."""
    # Threads of pyarrow would keep what they read until they read more.
    how: dict[str, Any] = {"columns": list(needs.ports), "use_threads": False}
    table = _read(file, lambda parquet: parquet.read_row_group(group, **how))
    check_unchanged(file, table.num_rows == count)
    chunk = {}
    for name in needs.ports:
        has_samples = name in needs.dims
        column = table.column(name).slice(0, None if has_samples else 1).combine_chunks()
        rows = _rows(column, name, needs, str(file))
        chunk[name] = np.moveaxis(rows, 0, needs.dims[name]) if has_samples else rows[0]
    return partial(needs.take, chunk)


def _read(file: Path, read: Any) -> Any:
    """Opens a Parquet file, and returns the result of the function `read` on it. Errors:
    InputError."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            return read(parquet)
    except OSError as error:
        raise InputError(cannot_read(file, error, "give a Parquet file")) from error
    except (ValueError, pyarrow.ArrowException) as error:
        raise InputError(f"{file} cannot be read: {error}; write it again") from error


def _rows(column: Any, name: str, needs: Needs, source: str) -> Array:
    """Returns a column as an array [row, ...] of samples. A sample of several dimensions is a list
    of lists, or a flat list of all its elements. `source` names the file in errors. Errors:
    InputError."""
    sizes = [size for size in needs.sizes(name) if size is not None]
    depth = _depth(column.type)
    if depth == 1 and len(sizes) > 1:
        whole = replace(needs, pad={})  # the end of a flat list is no place to fill
        return _lists(column, [math.prod(sizes)], name, whole, source).reshape(-1, *sizes)
    if depth != len(sizes):
        raise InputError(
            f"{source}: the column {name!r} has the type {column.type}; the step needs "
            f"{'lists of ' * len(sizes)}numbers, a sample in each row"
        )
    return _lists(column, sizes, name, needs, source)


def _depth(kind: Any) -> int:
    """Returns how deep lists are nested in a type: 2 for lists of lists of numbers."""
    from pyarrow import types

    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return 1 + _depth(kind.value_type) if any(is_list(kind) for is_list in lists) else 0


def _lists(column: Any, sizes: Sequence[int], name: str, needs: Needs, source: str) -> Array:
    """Returns a column of (nested lists of) numbers as an array [row, *sizes]; shorter lists are
    filled at their end. Errors: InputError."""
    import pyarrow.compute

    what = f"{source}: the column {name!r}"
    if column.null_count:
        raise InputError(f"{what} lacks {column.null_count} values; leave such rows out")
    if not sizes:
        array = column.to_numpy(zero_copy_only=False)
        dtype = dtype_of(needs.ports[name].type)
        return array if dtype is None else converted(array, dtype, what)
    lengths = pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False)
    inner = _lists(column.flatten(), sizes[1:], name, needs, source)
    size = sizes[0]
    odd = lengths[(lengths > size) | ((lengths < size) & (name not in needs.pad))]
    if len(odd):
        remedy = f"; fill shorter ones with --pad {name}=VALUE" if odd[0] < size else ""
        raise InputError(f"{what} has a list of {odd[0]}; the step needs {size}{remedy}")
    if (lengths == size).all():
        return inner.reshape(len(column), size, *sizes[1:])
    filled = np.full((len(column), size, *sizes[1:]), needs.pad[name]).astype(inner.dtype)
    filled[np.arange(size) < lengths[:, None]] = inner
    return filled
