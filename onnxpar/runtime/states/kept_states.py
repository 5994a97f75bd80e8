"""The states that a rank keeps between runs: values in memory, or tables in files, where each run
changes some rows.

The changes of a call become permanent with `settle`, after the call succeeded on all ranks; `undo`
reverts them. So rows are written to a table's file only when the run is over on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests
from onnxpar.graph.training_spec import FROZEN
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.options import SessionSpec
from onnxpar.runtime.session.shards import Shards
from onnxpar.runtime.session.tensors import copy_of, view_of, zeros
from onnxpar.runtime.states.first_states import FirstStates
from onnxpar.runtime.states.host_table import HostTable, RowCache, RowUpdate
from onnxpar.runtime.states.snapshot import Part, Snapshot
from onnxpar.runtime.states.state_files import PartFiles, StateFiles, write_parts


class KeptStates:
    """The values of one rank's states, by the name of the state's input."""

    def __init__(self, bundle: Bundle, rank: int, spec: SessionSpec) -> None:
        self._ports = bundle.inputs
        self._mesh = bundle.mesh
        self._rank = rank
        self._on_host = bundle.row_outputs
        self._folder = Path(spec.table_dir or bundle.path)
        self._cache = RowCache(spec.table_cache)
        self._first = FirstStates(bundle, rank)
        slots = bundle.step.slots if bundle.step is not None else ()
        self._unsaved = {slot.input for slot in slots if slot.kind == FROZEN}
        """Frozen weights that still have the values of the model, and are not saved."""
        self._kept: Mapping[str, Any] = {}
        self._before: Mapping[str, Any] | None = None
        self._updates: Mapping[str, RowUpdate] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._kept or name in self._first

    def value(self, name: str, parts: Shards) -> Any:
        """Returns the value of a state, kept or initial, as onnxruntime takes it. `parts` is how
        the state is split."""
        held = self._held(name, parts)
        return held.value if isinstance(held, HostTable) else held

    def array(self, name: str, parts: Shards) -> Array:
        """Returns the value of a state as an array that shares its memory. `parts` is how the state
        is split."""
        held = self._held(name, parts)
        is_table = isinstance(held, HostTable)
        return held.array if is_table else view_of(held, self._ports[name].dtype)

    def _held(self, name: str, parts: Shards) -> Any:
        """The value of a state as it is kept: an OrtValue or a HostTable, made from the initial
        value if none is kept."""
        if name not in self._kept:
            shape = parts.local_shape(self._rank)
            self._kept = {**self._kept, name: self._initial(name, shape)}
        return self._kept[name]

    def _initial(self, name: str, shape: tuple[int, ...] | None) -> Any:
        """The initial value of a state, in memory or in a new table. `shape` is the shape of this
        rank's shard."""
        if name not in self._on_host:
            return copy_of(self._first.value(name, shape))
        assert shape is not None, "the layout of a table is fixed"
        table = self._table(name, shape)
        place = self._first.place(name)
        if place is not None:
            table.copy_from(*place)
        elif not self._first.is_zero(name):
            table.copy(self._first.value(name, shape))
        return table

    def _table(self, name: str, shape: tuple[int, ...]) -> HostTable:
        """A new table on the host, of zeros."""
        return HostTable(self._folder, name, self._ports[name].dtype, shape)

    def keep(self, states: Mapping[str, Any], fed: Mapping[str, Array]) -> None:
        """Replaces all states by the states after a run. `states` has their values or, for tables,
        the rows that the run changed; `fed` has the inputs of the run, which may include a table's
        values before it."""
        updates = {n: each for n, each in states.items() if isinstance(each, RowUpdate)}
        tables = {n: self._of(n, fed[n]) if n in fed else self._kept[n] for n in updates}
        self._change({**states, **tables})
        self._updates = updates

    def put(self, name: str, part: Array) -> None:
        """Makes a copy of `part`, this rank's shard, the value of a state."""
        self._unsaved.discard(name)
        self._change({**self._kept, name: self._of(name, part)})

    def clear(self, name: str, parts: Shards) -> None:
        """Makes zeros this rank's value of a state. `parts` is how the state is split."""
        shape = parts.local_shape(self._rank)
        assert shape is not None, "sizes of states are known"
        self._change({**self._kept, name: zeros(shape, self._ports[name].dtype)})

    def reset(self) -> None:
        """Forgets all values, so that states have their initial values again."""
        self._change({})

    def _of(self, name: str, part: Array) -> Any:
        """Returns a copy of the shard `part` in the form in which values are kept."""
        if self._ports[name].is_value:
            return part
        if name not in self._on_host:
            return copy_of(part)
        table = self._table(name, part.shape)
        table.copy(part)
        return table

    def _change(self, states: Mapping[str, Any]) -> None:
        """Replaces all values; the values before stay until `settle`, for `undo`."""
        self._before, self._kept = self._kept, states

    def settle(self) -> None:
        """Makes the changes by the last call permanent."""
        for name, update in self._updates.items():
            update.write(self._kept[name].array)
        self._before, self._updates = None, {}
        if self._on_host:
            self._cache.trim(self._tables())

    def undo(self) -> None:
        """Reverts the changes by the last call."""
        self._updates = {}
        if self._before is not None:
            self._kept, self._before = self._before, None

    @property
    def memories(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """(the values now, the values before the last call); the latter are empty after
        `settle`."""
        return self._kept, self._before or {}

    def trimming(self) -> AbstractContextManager[None]:
        """Context of a run, which keeps the rows of tables that are in memory below their limit."""
        return self._cache.watching(self._tables())

    def _tables(self) -> list[HostTable]:
        return [each for each in self._kept.values() if isinstance(each, HostTable)]

    def save(self, folder: Path, parts: Mapping[str, Shards]) -> dict[str, Digests]:
        """Writes this rank's shards of states to a folder, except shards that a lower rank also has
        and writes; returns the digests of the files, by file name."""
        return write_parts(folder, self._rank, self._parts(parts))

    def save_later(self, folder: Path, parts: Mapping[str, Shards]) -> None:
        """Copies what `save` would write, and returns; a thread then writes the copies to the
        folder."""
        Snapshot(self._parts(parts)).write_later(folder, self._rank)

    def _parts(self, parts: Mapping[str, Shards]) -> Iterator[Part]:
        """Yields (name, this rank's shard) of the states to save: no shard that a lower rank also
        has, and no frozen weight that is as in the model."""
        saved = [n for n in parts if n not in self._unsaved and self._rank in parts[n].sources]
        for name in saved:
            held = self._held(name, parts[name])
            is_table = isinstance(held, HostTable)
            yield name, held if is_table else view_of(held, self._ports[name].dtype)

    def load(self, folder: Path, parts: Mapping[str, Shards]) -> None:
        """Reads this rank's shards of states from a folder that ranks of the same mesh wrote, in
        the same layouts."""
        self._unsaved -= parts.keys()
        files = PartFiles(folder)
        origins = {name: each.origins[self._rank] for name, each in parts.items()}
        self._change(
            {**self._kept, **{n: self._of(n, files.read(n, r)) for n, r in origins.items()}}
        )

    def gather(self, files: StateFiles, parts: Mapping[str, Shards]) -> None:
        """Reads this rank's shards of tables from files that ranks of any mesh wrote, block by
        block. `parts` is how this session splits each table."""
        tables = {}
        for name, each in parts.items():
            shape = each.local_shape(self._rank)
            layout = self._ports[name].layout
            assert shape is not None and layout is not None, "the layout of a table is fixed"
            tables[name] = self._table(name, shape)
            files.copy_shard(name, layout, self._mesh, self._rank, tables[name])
        self._change({**self._kept, **tables})
