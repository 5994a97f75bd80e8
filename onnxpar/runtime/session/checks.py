"""Checks of what users give to a session, before it is sent to the ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.base.units import quantity
from onnxpar.runtime.ranks.cores import BINDINGS
from onnxpar.runtime.session.bundle import Bundle, Port
from onnxpar.runtime.session.options import CACHE
from onnxpar.runtime.session.ort_values import array_of, is_ort_value
from onnxpar.runtime.session.values import checked_value, is_optional


def check_feeds(
    bundle: Bundle, feeds: Mapping[str, Any], kept: Collection[str]
) -> dict[str, Array]:
    """Returns the feeds as arrays, in the order of the model's inputs. `kept` names inputs that
    need no feed, because they are states that an earlier run left. Errors: InputError, which names
    the input, what was given and what is expected."""
    unknown = [name for name in feeds if name not in bundle.inputs]
    if unknown and unknown[0] in bundle.fixed:
        raise InputError(
            f"input {unknown[0]!r} was fixed when the model was sharded, because shapes depend on "
            "it; change its default value in the model and shard it again"
        )
    if unknown:
        raise InputError(f"no input is named {unknown[0]!r}; the inputs are {_list(bundle.inputs)}")
    missing = [
        name
        for name, port in bundle.inputs.items()
        if name not in feeds
        and name not in kept
        and not port.has_default
        and not is_optional(port.type)
    ]
    if missing:
        port = bundle.inputs[missing[0]]
        hint = " (or keep it with keep_states=True)" if missing[0] in bundle.states else ""
        raise InputError(f"input {missing[0]!r} is not fed; give {port.expects()}{hint}")
    return {
        name: check_array(port, feeds[name])
        for name, port in bundle.inputs.items()
        if name in feeds
    }


def check_kept(bundle: Bundle, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises an InputError if a kept state, with the shape that the last run gave it, does not fit
    its input."""
    for name, shape in shapes.items():
        port = bundle.inputs[name]
        if shape != port.shape and not port.is_value and not port.admits(shape):
            raise InputError(
                f"state {name!r} is {list(shape)} after the last run, but the model takes "
                f"{port.expects()}; feed it, or shard a model that leaves this size open"
            )


def check_array(port: Port, value: Any) -> Any:
    """Returns `value` as an array that fits the port; if the port is no tensor of numbers, as a
    value of its type. Errors: InputError for another dtype or shape."""
    if port.is_value:
        return _check_value(port, value)
    if is_ort_value(value):
        array = array_of(value)
    elif isinstance(value, list):
        array = _array_of_list(port, value)
    else:
        as_numpy = getattr(value, "numpy", None)  # a tensor of PyTorch
        array = np.asarray(as_numpy() if callable(as_numpy) else value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype != port.dtype:
        remedy = f"convert it with .astype({port.dtype.name!r})"
    elif not port.admits(array.shape):
        remedy = "give the shape of the unsplit model's input"
    else:
        return array
    actual = f"{array.dtype.name} {list(array.shape)}"
    raise InputError(
        f"input {port.name!r} was given {actual}, but expects {port.expects()}; {remedy}"
    )


def _array_of_list(port: Port, value: list[Any]) -> Array:
    """Converts a list to an array of the port's dtype. Like onnxruntime, onnxpar converts lists,
    but not arrays of another dtype. Errors: InputError if the list cannot be converted."""
    try:
        return np.asarray(value, port.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"input {port.name!r} was given a list that cannot be converted to {port.expects()}: "
            f"{error}"
        ) from None


def _check_value(port: Port, value: Any) -> Any:
    """Returns `value` as a value of the port's type, such as a sequence. Errors: InputError if it
    is of another type or shape."""
    try:
        if is_ort_value(value):
            value = array_of(value)
        checked = checked_value(port.type, value)
    except TypeError as error:
        raise InputError(f"input {port.name!r} is a {port.type}: it expects {error}") from None
    if isinstance(checked, np.ndarray) and not port.admits(checked.shape):
        raise InputError(
            f"input {port.name!r} has the shape {list(checked.shape)}, but the model takes "
            f"{list(port.shape or ())}"
        )
    return checked


def check_names(bundle: Bundle, names: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """Returns the names of the requested outputs, or `default` if `names` is None or empty. Errors:
    InputError for an unknown name."""
    for name in names or ():
        if name not in bundle.outputs:
            raise InputError(
                f"no output is named {name!r}; the outputs are {_list(bundle.outputs)}"
            )
    return list(names or default)


def state_port(bundle: Bundle, name: str) -> Port:
    """Returns the port of a state, by the name of its input. Errors: InputError if it is no
    state."""
    if name not in bundle.states:
        raise InputError(f"no state is named {name!r}; the states are {_list(bundle.states)}")
    return bundle.inputs[name]


def _list(names: Collection[str]) -> str:
    """The names as text for an error."""
    return ", ".join(names) or "(none)"


def check_bind(bind: str) -> str:
    """Returns `bind`, how threads are bound to cores. Errors: InputError unless it is one of
    BINDINGS."""
    if bind not in BINDINGS:
        raise InputError(f"bind {bind!r}: give {', '.join(BINDINGS)}")
    return bind


def check_elsewhere(of_host: Mapping[str, object], bind: str) -> None:
    """Checks the options of a session whose ranks do not run on this host. Errors: InputError for
    an option that is about processes of this host. `of_host` has the values of such options by
    name; None: not given."""
    names = [name for name, value in of_host.items() if value is not None]
    if bind != BINDINGS[0]:
        names.append("bind")
    if names:
        raise InputError(f"{names[0]} is for ranks on this host; leave it out with start_ranks")


def check_replica(replica: int, replicas: int) -> None:
    """Raises an InputError unless `replica` is from 0 to `replicas` - 1."""
    if not 0 <= replica < replicas:
        raise InputError(f"replica {replica} of {replicas}: give a number from 0 to replicas - 1")


def check_ranks_per_numa(count: int | None, bind: str, is_launched: bool) -> int:
    """Returns the number of ranks on each NUMA node, 0 for None. Errors: InputError unless it is at
    least 1, and onnxpar, not a launcher, binds the ranks."""
    if count is None:
        return 0
    if not isinstance(count, int) or count < 1:
        raise InputError(f"ranks_per_numa {count}: give a whole number of at least 1")
    if bind == "none":
        raise InputError(
            f"ranks_per_numa {count}: bind 'none' binds no rank to a node; leave it out"
        )
    if is_launched:
        raise InputError(
            f"ranks_per_numa {count}: the launcher that started this process places ranks (mpirun "
            f"--map-by ppr:{count}:numa --bind-to numa); leave out ranks_per_numa"
        )
    return count


def check_threads(threads: int, most: float = math.inf) -> int:
    """Returns `threads`, the number of threads of a rank. Errors: InputError unless it is a whole
    number from 1 to `most`."""
    if not isinstance(threads, int) or threads < 1:
        raise InputError(f"threads {threads}: give a whole number of at least 1")
    if threads > most:
        raise InputError(
            f"threads {threads}: give at most {most}, which are {CROWD} for each hardware thread "
            "of this host"
        )
    return threads


CROWD = 16
"""Most threads of a rank for each hardware thread of its host: more take too long to start, because
they spin."""
LONGEST = 1e8
"""The longest timeout in seconds: three years, which sockets still accept."""


def check_timeout(seconds: float) -> None:
    """Raises an InputError unless the timeout is positive and at most LONGEST."""
    if not 0 < seconds <= LONGEST:
        raise InputError(
            f"timeout {seconds:g}: give a number of seconds above 0 and at most {LONGEST:,.0f}"
        )


def check_table_dir(bundle: Bundle, folder: str | os.PathLike[str] | None) -> str:
    """Returns the folder for the files of tables on the host, by default the folder of the sharded
    model; empty if the model has no such tables. Errors: InputError if no file can be made in the
    folder."""
    if not bundle.row_outputs:
        return ""
    place = Path(folder or bundle.path)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        fault = "cannot be written" if place.is_dir() else "is not a folder"
        raise InputError(
            f"{place} {fault}, and tables on the host need files while ranks run; name another "
            "folder with --table-dir (table_dir)"
        )
    return str(place.resolve())


def check_table_cache(size: float | str | None) -> int:
    """Returns the number of bytes of table rows that a rank may keep in memory, from a number, or
    from text with a unit ("2 GB"); None: the default. Errors: InputError for a negative number, or
    an unknown unit."""
    if size is None:
        return CACHE
    try:
        size_ = quantity(size, "B", "--table-cache", may_omit_unit=not isinstance(size, str))
    except OnnxparError as error:
        raise InputError(str(error)) from None
    if size_ < 0:
        raise InputError(f"--table-cache {size}: give 0 or more")
    return int(size_)
