"""The states that a session's ranks keep between runs, as users read and write them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests
from onnxpar.base.errors import InputError
from onnxpar.runtime.session.bundle import Port, Sizes
from onnxpar.runtime.session.checks import check_array, check_kept, state_port
from onnxpar.runtime.session.shards import Shards
from onnxpar.runtime.states.host_table import row_blocks, unmap_written
from onnxpar.runtime.states.state_files import Origin

if TYPE_CHECKING:
    from onnxpar.runtime.session.session import Session


def _check_out(name: str, out: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raises an InputError if a state of this shape and dtype cannot be written to `out`."""
    if out.shape != shape or out.dtype != dtype or not out.flags.writeable:
        kind = "" if out.flags.writeable else "read-only "
        raise InputError(
            f"out is a {kind}{out.dtype} array of shape {list(out.shape)}; state {name!r} needs a "
            f"writable {dtype} array of shape {list(shape)}"
        )


def _shape(port: Port) -> tuple[int, ...]:
    """Returns the global shape of a state that has an initial value; such a shape has no open
    sizes."""
    return tuple(s for s in port.shape or () if isinstance(s, int))


class States:
    """Reads and writes the states that a session's ranks keep between runs, by the name of the
    state's input."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        kept = self._session._kept
        texts = [f"{n} {list(kept[n])}" if n in kept else f"{n} not kept" for n in self.names]
        return f"<States: {', '.join(texts) or 'none'}>"

    @property
    def names(self) -> list[str]:
        """The names of all states, which are the names of their inputs."""
        return list(self._session._bundle.states)

    def read(self, name: str, out: Array | None = None) -> Array:
        """Returns the value of a state, kept or initial, as a global array. Ranks send it in blocks
        of 8 MiB. With `out`, an array of the state's shape and dtype, such as one from
        `numpy.memmap`, the value is written there. Errors: InputError if the state has no value, or
        if `out` does not fit."""
        session = self._session
        port = state_port(session._bundle, name)
        with session._lock:
            if name not in session._kept and name not in session._bundle.initial:
                raise InputError(
                    f"no value of state {name!r} is kept; run with keep_states=True, or write it"
                )
            shape = session._kept.get(name) or _shape(port)
            check_kept(session._bundle, {name: shape})
            sizes = session._bundle.sizes({name: shape})
            parts = session._parts.at(sizes)[name]
            if port.is_value or any(parts.rows(rank) is None for rank in parts.sources):
                value = session._assemble(name, session._ranks.read_state(name, sizes), sizes)
                if out is None:
                    return value
                _check_out(name, out, np.shape(value), np.asarray(value).dtype)
                np.copyto(out, value)
                return out
            if out is None:
                out = np.empty(shape, port.dtype)
            _check_out(name, out, shape, port.dtype)
            self._copy(name, sizes, parts, out)
            return out

    def _copy(self, name: str, sizes: Sizes, parts: Shards, whole: Array) -> None:
        """Copies a state from the ranks into the global array `whole`, block by block. `parts` is
        how it is split."""
        heights = [parts.rows(rank) or 0 for rank in parts.sources]
        widths = [(parts.local_shape(rank) or ())[1:] for rank in parts.sources]
        widest = max(widths, key=lambda shape: int(np.prod(shape, dtype=np.int64)))
        for rows in row_blocks((max(heights), *widest), whole.dtype):
            interval = rows.start, rows.stop
            for rank, part in self._session._ranks.read_state(name, sizes, interval)[name].items():
                parts.place(whole, rank, rows.start, part)
            unmap_written(whole)

    def write(self, name: str, value: Any) -> None:
        """Sets the value of a state to a global array. Errors: InputError if no state has this
        name, or if its dtype or shape is another."""
        session = self._session
        port = state_port(session._bundle, name)
        array = check_array(port, value)
        with session._lock:
            shape = () if port.is_value else np.shape(array)
            session._ranks.write_state(name, array, session._bundle.sizes({name: shape}))
            session._kept[name] = shape

    def clear(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Sets states to zeros of these global shapes, by name; each rank makes its own shards.
        Errors: InputError for a shape that the model does not take."""
        session = self._session
        ports = {name: state_port(session._bundle, name) for name in shapes}
        wanted = {name: tuple(shape) for name, shape in shapes.items()}
        for name, shape in wanted.items():
            if not ports[name].admits(shape):
                raise InputError(
                    f"state {name!r} is {ports[name].expects()}; it cannot have shape {list(shape)}"
                )
        with session._lock:
            sizes = session._bundle.sizes(wanted)
            for name, shape in wanted.items():
                session._ranks.clear_state(name, sizes)
                session._kept[name] = shape

    @property
    def on_host(self) -> list[str]:
        """The names of the states that are tables on the host."""
        return list(self._session._bundle.row_outputs)

    def save(self, folder: str | os.PathLike[str]) -> dict[str, Digests]:
        """Writes all states, kept or initial, to a folder; each rank writes its own shards. Returns
        the digests of the files, by file name. Errors: InputError if a state has no value."""
        session = self._session
        with session._lock:
            return session._ranks.save_states(os.path.abspath(folder), self._sizes())

    def save_later(self, folder: str | os.PathLike[str]) -> None:
        """Copies on each rank what `save` would write, and returns; a thread of each rank then
        writes the copies. The file `snapshot.marker(rank)` tells that a rank has written. Errors:
        InputError if a state has no value."""
        session = self._session
        with session._lock:
            session._ranks.save_states_later(os.path.abspath(folder), self._sizes())

    def _sizes(self) -> Sizes:
        """Returns the values of the open sizes that follow from all states. Errors: InputError if a
        state has no value."""
        session, bundle = self._session, self._session._bundle
        missing = [n for n in bundle.states if n not in session._kept and n not in bundle.initial]
        if missing:
            raise InputError(f"no value of state {missing[0]!r} is kept; run or write it first")
        shapes = {n: session._kept.get(n) or _shape(bundle.inputs[n]) for n in bundle.states}
        return bundle.sizes(shapes)

    def load(
        self,
        folder: str | os.PathLike[str],
        names: Sequence[str],
        origin: Origin | None = None,
    ) -> None:
        """Reads these states from a folder that `save` wrote, in this session or in another one;
        each rank reads its own shards. `origin` has the mesh and the layouts of the files; without
        it, both must be the same as in this session. With it, the states must be tables on the
        host."""
        session = self._session
        ports = [state_port(session._bundle, name) for name in names]
        shapes = {port.name: _shape(port) for port in ports}
        with session._lock:
            sizes = session._bundle.sizes(shapes)
            session._ranks.load_states(os.path.abspath(folder), names, sizes, origin)
            session._kept.update(shapes)

    def undo(self) -> None:
        """Returns to the values before the last run; no other call may have followed that run."""
        session = self._session
        with session._lock:
            session._ranks.undo_states()

    def reset(self) -> None:
        """Forgets all kept values: states return to their initial values, or must be fed."""
        session = self._session
        with session._lock:
            session._ranks.reset_states()
            session._kept.clear()
