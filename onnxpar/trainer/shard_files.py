"""Folders of training data: shards are files of NumPy arrays; one shard at a time is in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.base.unreadable import cannot_read
from onnxpar.runtime.session.npz import PARSING, npz_shapes, read_npz, why
from onnxpar.trainer.needs import Chunk, Needs
from onnxpar.trainer.parquet import SUFFIX, parquet_shards
from onnxpar.trainer.sources import Shard, Shards, Take, check_unchanged, digest_of_files


def folder_shards(folder: Path, needs: Needs) -> Shards:
    """Returns the samples in a folder: .npz files with an array for each input; .parquet files; or
    for each input a file NAME.npy, or a folder NAME of .npy files of the same names. Errors:
    InputError that names the file."""
    names = _names(folder)
    npz, parquet = ([n for n in names if n.endswith(end)] for end in (".npz", SUFFIX))
    npy = [name for name in needs.ports if f"{name}.npy" in names or (folder / name).is_dir()]
    kinds = [kind for kind, has in ((".npz", npz), (SUFFIX, parquet), (".npy", npy)) if has]
    if len(kinds) != 1:
        have = " and ".join(kinds) or "none"
        raise InputError(
            f"{folder}: give a folder with files of one kind: .npz, {SUFFIX}, or NAME.npy for each "
            f"input ({', '.join(needs.ports)}); this one has {have}"
        )
    if npz:
        return _npz_shards([folder / name for name in npz], folder, needs)
    if parquet:
        return parquet_shards([folder / name for name in parquet], needs)
    return _npy_shards(folder, needs)


def _names(folder: Path) -> list[str]:
    """Returns the names of the files in a folder, sorted, without hidden ones. Errors:
    InputError."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise InputError(cannot_read(folder, error, "give a folder")) from error


def _npz_shards(files: Sequence[Path], folder: Path, needs: Needs) -> Shards:
    """Returns the samples of .npz files; each file is a shard."""
    shards = []
    for file in files:
        count = needs.counted(npz_shapes(file), str(file))
        shards.append(Shard(count, partial(_open_npz, file, count, needs)))
    return Shards(shards, lambda: digest_of_files(files, folder, needs))


def _open_npz(file: Path, count: int, needs: Needs) -> Take:
    """Reads an .npz file of `count` samples. Returns the function that takes samples by number.
    Errors: InputError."""
    chunk = needs.chunk(read_npz(file, needs.ports), str(file))
    check_unchanged(file, needs.count(chunk) == count)
    return partial(needs.take, chunk)


def _npy_shards(folder: Path, needs: Needs) -> Shards:
    """Returns the samples of .npy files: a shard has one file of each input, all with the same
    name."""
    each = {name: _npy_files(folder, name, name in needs.dims) for name in needs.ports}
    first = next(iter(needs.dims), "")
    for name in needs.dims:
        for one, other in ((name, first), (first, name)):
            if lacks := sorted(each[one].keys() - each[other].keys()):
                raise InputError(
                    f"{each[one][lacks[0]]} has no counterpart for the input {other!r}; give files "
                    "of the same names for each input"
                )
    shards = []
    for key in sorted(each[first]) if first else ():
        files = {name: by_key.get(key) or by_key[""] for name, by_key in each.items()}
        shapes = {name: _mapped(file).shape for name, file in files.items()}
        count = needs.counted(shapes, str(folder / first / key) if key else str(folder))
        shards.append(Shard(count, partial(partial, _take_npy, files, shapes, needs)))
    every = sorted({file for by_key in each.values() for file in by_key.values()})
    return Shards(shards, lambda: digest_of_files(every, folder, needs))


def _npy_files(folder: Path, name: str, has_samples: bool) -> dict[str, Path]:
    """Returns the .npy files of an input, by their names in the input's folder; {"": file} for a
    single file NAME.npy. Errors: InputError if there is none."""
    file, inner = folder / f"{name}.npy", folder / name
    if file.is_file():
        return {"": file}
    if has_samples and inner.is_dir():
        files = {key: inner / key for key in _names(inner) if key.endswith(".npy")}
        if files:
            return files
    or_folder = f", or a folder {name} of .npy files" if has_samples else ""
    raise InputError(f"{folder} has no array for the input {name!r}; give {file}{or_folder}")


def _mapped(file: Path) -> Array:
    """Returns an array over a memory-mapped .npy file. Errors: InputError."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        if isinstance(array, np.ndarray):
            return array.view(np.ndarray)
    except OSError as error:
        raise InputError(cannot_read(file, error, "give a .npy file")) from error
    except (ValueError, EOFError, ArithmeticError, MemoryError, *PARSING) as error:
        raise InputError(
            f"{file} cannot be read: {why(error)}; write it with numpy.save"
        ) from error
    raise InputError(f"{file} is no single array; write it with numpy.save")


def _take_npy(
    files: Mapping[str, Path],
    shapes: Mapping[str, tuple[int, ...]],
    needs: Needs,
    rows: Array,
) -> Chunk:
    """Returns the samples with the numbers `rows` from .npy files (by input name). Maps the files
    anew each time, so that pages that were read before do not count as memory of this process.
    Errors: InputError if a file has another shape than in `shapes`."""
    mapped = {name: _mapped(file) for name, file in files.items()}
    for name, array in mapped.items():
        check_unchanged(files[name], array.shape == shapes[name])
    taken = needs.take(mapped, rows)
    return {name: needs.filled(name, taken[name], str(file)) for name, file in files.items()}
