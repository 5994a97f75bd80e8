"""Runs one rank's graph in onnxruntime: binds its inputs and outputs, and keeps its states between
runs. A state is an output that becomes an input of the next run, such as a cache or a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests
from onnxpar.base.errors import RankError, RunError
from onnxpar.graph.training_spec import EVALUATION
from onnxpar.runtime.profile.profile import Record
from onnxpar.runtime.ranks import groups
from onnxpar.runtime.ranks.arena import NOWHERE, Heap, Room, Slot
from onnxpar.runtime.ranks.binding import Binding
from onnxpar.runtime.ranks.check_start import check_start
from onnxpar.runtime.ranks.planned_run import Request
from onnxpar.runtime.ranks.rank_failure import failure_text
from onnxpar.runtime.ranks.rank_sessions import RankSessions
from onnxpar.runtime.ranks.repeated_run import RepeatedRun, Turn, bound
from onnxpar.runtime.ranks.several_runs import SeveralRuns
from onnxpar.runtime.session.bundle import Bundle, Sizes
from onnxpar.runtime.session.options import SessionSpec, run_options
from onnxpar.runtime.session.own_shards import OwnShards
from onnxpar.runtime.session.shards import Rows
from onnxpar.runtime.session.tensors import (
    as_fed,
    bind_input,
    copy_of,
    is_packed,
    view_of,
)
from onnxpar.runtime.states.host_table import RowUpdate
from onnxpar.runtime.states.kept_states import KeptStates
from onnxpar.runtime.states.state_files import Origin, StateFiles

SIZES = "onnxpar.sizes"
"""The name of an input that the compiler adds to a rank's graph, for the values of the open
sizes."""

Facts = Mapping[str, Any]
"""Facts about a rank's onnxruntime session: `providers`, `provider_options` and
`profiling_start_ns`."""


class Executor:
    """Runs one rank's graph, again and again, and keeps the rank's states.

    bundle      the sharded model
    world       the ranks, and which of them this one is
    spec        the options of the session
    threads     the number of threads that compute; 0: onnxruntime's default
    spin        True if these threads may spin while they wait
    everywhere  True: every rank returns a tensor that all ranks have whole; False: rank 0 alone
                does
    """

    def __init__(
        self,
        bundle: Bundle,
        world: groups.World,
        spec: SessionSpec,
        threads: int = 0,
        spin: bool = True,
        *,
        everywhere: bool = False,
    ) -> None:
        check_start(bundle, world, spec.verify)
        world.open_streams(bundle.streams)
        self._sessions = RankSessions(bundle, world, spec, threads, spin)
        self._bundle = bundle
        self._apart = bundle.apart
        self._rank = world.rank
        self._world_size = world.size
        self._own = OwnShards(bundle, world.rank, everywhere=everywhere)
        self._ports = self._own.ports
        self._has_sizes = bool(bundle.symbols) and not bundle.programs
        self._states = bundle.states
        self._in_place = bundle.in_place
        self._row_outputs = {bundle.states[n]: (n, *o) for n, o in bundle.row_outputs.items()}
        self._kept = KeptStates(bundle, world.rank, spec)
        self._defaults = [
            name
            for name, port in bundle.inputs.items()
            if port.has_default and name not in bundle.initial
        ]
        self._has_values = any(port.is_value for port in self._ports.values())
        self._take("")
        self._last: tuple[Request, Mapping[str, Array]] | None = None
        self._several: SeveralRuns | None = None
        self._repeated: RepeatedRun | None = None
        self._carried: dict[str, Array] = {}
        self.running: ort.RunOptions | None = None
        """The options of the current run, for `stop`."""
        self.stopped = False
        self.kept_shapes: dict[str, tuple[int, ...]] = {}
        """The global shapes of the states that the last run kept, by input."""

    def _take(self, program: str) -> None:
        """Selects the program (ONNX file) that runs, and opens its session. Errors: ModelError if
        it does not load."""
        self._program = program
        self.session = self._sessions.open(program)
        inputs = self.session.get_inputs()
        self._inputs = [a.name for a in inputs if a.name in self._bundle.inputs]
        self._binding = Binding(self.session)
        self._inferred = {a.name: a.shape for a in self.session.get_outputs()}

    def run(self, request: Request, feeds: Mapping[str, Array], room: Room) -> dict[str, Slot]:
        """Runs the graph once, or as often as the request says. Returns this rank's shards of the
        outputs, by name; the shards of several runs are stacked along a new first dimension.

        feeds  this rank's shards of the inputs, which must be contiguous
        room   the memory in which the outputs are placed: an Arena, which the session shares, or a
               Heap

        Leaves out shards that another rank returns. If `request.keep`, state outputs stay in the
        executor as inputs of the next run. Errors: RunError if the ranks can continue, else
        RankError.
        """
        several = self._several.continued(request, feeds) if self._several else None
        if several is None:
            self._forget_run()
            if request.carried:
                several = SeveralRuns.of(request, feeds)
            self._options = run_options(request.options)
        is_again = self._several is not None
        self._several = several
        self._last = (several.once, several.feeds) if several else (request, feeds)
        return self._run(room, is_again)

    def run_again(self, room: Room) -> dict[str, Slot]:
        """Runs the last request again, on whatever the memory of its inputs now contains. Returns
        like `run`; may write to the memory of the last results instead of `room`."""
        return self._run(room, is_again=True)

    def _run(self, room: Room, is_again: bool) -> dict[str, Slot]:
        """Runs the prepared request. `is_again` says that the same request ran before, so that
        preparing repetitions pays. Errors: RunError for failures of onnxruntime."""
        self.kept_shapes = {}
        self.running = self._options  # `stop` ends the run by these; `undo` follows
        try:
            if self._several is not None:
                return self._run_several(self._several, room, is_again)
            return self._run_once(room, is_again)
        except RankError:
            raise
        except Exception as error:
            file = self._bundle.rank_file(self._rank, self._program)
            ranks = self._world_size
            raise RunError(failure_text(error, file, self._rank, ranks)) from error
        finally:
            self.running = None

    def _run_several(self, several: SeveralRuns, room: Room, is_again: bool) -> dict[str, Slot]:
        """Runs as often as the request says. After each run, the outputs in `request.carried`
        become inputs of the next."""
        several.begin()
        for number in range(several.request.times):
            slots = self._run_once(Heap(), is_again or number > 0)
            several.take(number, slots, room)
            several.carry(self._carried)
        return several.slots

    def _run_once(self, room: Room, is_again: bool) -> dict[str, Slot]:
        """Runs the request once: by the prepared repetition if there is one, else by binding inputs
        and outputs."""
        if self._repeated is not None:
            return self._run_repeated(self._repeated)
        assert self._last is not None, "a run was planned"
        request, feeds = self._last
        options = self._options
        self._own.at(request.sizes)
        program = self._bundle.programs.get(tuple(request.sizes), "")
        if program != self._program:
            self._take(program)
        if not self._apart.isdisjoint(request.fetch):
            return self._evaluate(request, feeds, room, options)
        if self._has_values:
            return self._run_values(request, feeds, room, options)
        order = self._order(request)
        self._carried = {o: self._own.empty(o) for o in request.carried.values()}
        self._binding.start(order, [name for name in self._defaults if name not in feeds])
        self._bind_inputs(feeds, request.sizes)
        bound_slots = self._bind_outputs(order, request, feeds, room)
        slots = dict(bound_slots)
        with self._kept.trimming():
            self.session.run_with_iobinding(self._binding.native, options)
        values: dict[str, ort.OrtValue | RowUpdate] = dict(self._binding.results)
        for name, (_, *outputs) in self._row_outputs.items():
            if outputs[0] in values:
                values[name] = RowUpdate(*(values.pop(output) for output in outputs))
        shapes = {name: self._shape(name, value) for name, value in values.items()}
        for name in request.fetch:
            if name not in slots and self._own.are_given(name):
                slots[name] = self._shipped(name, values[name], feeds, room)
        if request.keep:
            in_place = self._changed_in_place(feeds)
            lasting = {
                i: self._state(i) if i in in_place else self._lasting(o, values[o])
                for i, o in self._states.items()
            }
            self._kept.keep(lasting, feeds)
            self.kept_shapes = {i: shapes[o] for i, o in self._states.items()}
            # In onnxruntime up to at least 1.25, kept values share the memory of the binding's
            # outputs: binding these again would change them.
            self._binding.forget()
        if is_again:
            self._repeated = self._repeat(request, feeds, order, bound_slots)
        return slots

    def _repeat(
        self,
        request: Request,
        feeds: Mapping[str, Array],
        order: Sequence[str],
        slots: dict[str, Slot],
    ) -> RepeatedRun | None:
        """Prepares repetitions of the last run, with everything bound. Returns None if repetitions
        would need other memory each time: a size depends on data; a kept state is also fetched, is
        passed through from an input, or is a table on the host; or an input must be packed.

        order  the outputs of the rank's graph that were computed
        slots  the memory of the results
        """
        kept = self._states if request.keep else {}
        packed = any(is_packed(array.dtype) for array in feeds.values())
        if packed or self._row_outputs or not self._own.passed.isdisjoint(kept.values()):
            return None
        shipped = {n for n in request.fetch if self._own.are_given(n)} - slots.keys()
        if shipped or any(self._own.shape(n) is None for n in order):
            return None
        inputs = {name: feeds[name] for name in (*self._inputs, *self._defaults) if name in feeds}
        if self._has_sizes:
            inputs[SIZES] = self._sizes
        outputs: dict[str, Any] = {
            n: slots[n].array if n in slots else self._carried.get(n) for n in order
        }
        after, before = self._kept.memories
        turns = []
        for reads, writes in ((after, before), (before, after)) if kept else ((after, {}),):
            held = {name: reads[name] for name in self._inputs if name not in feeds}
            outputs.update({o: writes[i] for i, o in kept.items()})
            turns.append(Turn(bound(self.session, inputs, held, outputs), writes))
        return RepeatedRun(turns, inputs, slots, self.kept_shapes)

    def _run_repeated(self, repeated: RepeatedRun) -> dict[str, Slot]:
        """Runs a prepared repetition."""
        states = repeated.run(self.session, self._options)
        if states:
            self._kept.keep(states, {})
        self.kept_shapes = repeated.kept_shapes
        return repeated.slots

    def stop(self, run: ort.RunOptions) -> None:
        """Makes a run end at its next node, because another rank has failed; any thread may call
        this."""
        self.stopped = True
        run.terminate = True

    def settle(self) -> None:
        """Makes the changes of states by the last call permanent, after the call succeeded on all
        ranks."""
        self._kept.settle()
        self.stopped = False

    def undo(self) -> None:
        """Reverts the changes of states by the last call, after it failed on a rank."""
        self._kept.undo()
        self._binding.forget()
        self._forget_run()

    def _forget_run(self) -> None:
        """Makes the next run bind anew: the bindings of the last one read the states that it
        kept."""
        self._last = self._several = self._repeated = None

    def read_state(self, name: str, room: Room, sizes: Sizes, rows: Rows = None) -> dict[str, Slot]:
        """Returns {name: this rank's shard of a state}, in memory of `room`; empty if another rank
        returns the same shard. With `rows` (start, end), only these rows of the shard."""
        self._own.at(sizes)
        if not self._own.are_given(name):
            return {}
        is_value = self._ports[name].is_value
        kept = self._state(name) if is_value else self._kept.array(name, self._own[name])
        return {name: self._put(name, kept, room, rows)}

    def write_state(self, name: str, part: Array) -> None:
        """Makes a copy of `part`, this rank's shard, the value of a state."""
        self._forget_run()
        self._kept.put(name, part)

    def clear_state(self, name: str, sizes: Sizes) -> None:
        """Fills this rank's shard of a state with zeros."""
        self._forget_run()
        self._own.at(sizes)
        self._kept.clear(name, self._own[name])

    def save_states(self, folder: Path, sizes: Sizes) -> dict[str, Digests]:
        """Writes this rank's shards of all states to a folder, except shards that a lower rank also
        has and writes; returns the digests of the files, by file name."""
        self._own.at(sizes)
        return self._kept.save(folder, {name: self._own[name] for name in self._states})

    def save_states_later(self, folder: Path, sizes: Sizes) -> None:
        """Copies what `save_states` would write, and returns; a thread then writes the copies, and
        leaves the digests in the folder (`runtime/states/snapshot.py`)."""
        self._own.at(sizes)
        self._kept.save_later(folder, {name: self._own[name] for name in self._states})

    def load_states(
        self, folder: Path, names: Sequence[str], sizes: Sizes, origin: Origin | None = None
    ) -> None:
        """Reads this rank's shards of these states from a folder that `save_states` wrote. If the
        states there are split over another mesh, `origin` says how."""
        self._forget_run()
        self._own.at(sizes)
        parts = {name: self._own[name] for name in names}
        if origin is None:
            self._kept.load(folder, parts)
        else:
            self._kept.gather(StateFiles.of(folder, origin), parts)

    def end_profile(self) -> Record:
        """Ends the recording; returns it. Its `file` is onnxruntime's own profile of this rank, if
        there is one."""
        return self._sessions.end_profile()

    def facts(self) -> Facts:
        """Returns facts about this rank's onnxruntime session: its providers, their options, and
        when it began to record."""
        session = self.session
        return {
            "providers": session.get_providers(),
            "provider_options": session.get_provider_options(),
            "profiling_start_ns": session.get_profiling_start_time_ns(),
        }

    def reset_states(self) -> None:
        """Forgets all states, so that the next run starts from initial values."""
        self._forget_run()
        self._kept.reset()

    def _evaluate(
        self,
        request: Request,
        feeds: Mapping[str, Array],
        room: Room,
        options: ort.RunOptions,
    ) -> dict[str, Slot]:
        """Runs the evaluation program of a training step on the current states; returns this rank's
        shards of its outputs."""
        session = self._sessions.open(self._program, EVALUATION)
        names = [port.name for port in session.get_inputs()]
        names += [p.name for p in session.get_overridable_initializers() if p.name in feeds]
        inputs = {n: copy_of(feeds[n]) if n in feeds else self._state(n) for n in names}
        with self._kept.trimming():
            values = session.run_with_ort_values(list(request.fetch), inputs, options)
        outputs = dict(zip(request.fetch, values, strict=True))
        return {n: self._ship(n, outputs[n], room) for n in request.fetch if self._own.are_given(n)}

    def _state(self, name: str) -> Any:
        """Returns the value of a state: the value that the last run kept or, without one, the
        initial value."""
        return self._kept.value(name, self._own[name])

    def _run_values(
        self,
        request: Request,
        feeds: Mapping[str, Array],
        room: Room,
        options: ort.RunOptions,
    ) -> dict[str, Slot]:
        """Runs a graph with inputs or outputs that are not tensors of numbers, which cannot be
        bound; returns like `run`."""
        kept = list(self._states.values()) if request.keep else []
        order = list(dict.fromkeys([*request.fetch, *kept]))
        held = {n: self._state(n) for n in self._states if n in self._kept}
        inputs = held | {
            name: value if self._ports[name].is_value else as_fed(value)
            for name, value in feeds.items()
        }
        if self._has_sizes:
            inputs[SIZES] = as_fed(np.array(request.sizes, np.int64))
        results = dict(zip(order, self.session.run(order, inputs, options), strict=True))
        shapes = {n: self._own.check(n, r.shape) for n, r in results.items() if _is_tensor(r)}
        if request.keep:
            copies = {i: self._copied(i, results[o]) for i, o in self._states.items()}
            self._kept.keep(copies, feeds)
            self.kept_shapes = {i: shapes.get(o, ()) for i, o in self._states.items()}
        return {n: self._put(n, results[n], room) for n in request.fetch if self._own.are_given(n)}

    def _bind_inputs(self, feeds: Mapping[str, Array], sizes: Sizes) -> None:
        """Binds all inputs, to their feeds or, for states without a feed, to their kept values;
        inputs with a default only if they are fed."""
        for name in [*self._inputs, *(name for name in self._defaults if name in feeds)]:
            if name in feeds:
                self._binding.feed(name, feeds[name])
            else:
                self._binding.use(name, self._state(name))
        if self._has_sizes:
            self._sizes = np.array(sizes, np.int64)
            bind_input(self._binding.native, SIZES, self._sizes)

    def _order(self, request: Request) -> list[str]:
        """Returns the names of the outputs of the rank's graph that a run of this request computes,
        in order: to return them, to keep them as states, or to carry them to the next run."""
        kept = self._states.values() if request.keep else ()
        every = (*request.fetch, *kept, *request.carried.values())
        asked = [name for each in every for name in self._computed(each)]
        return list(dict.fromkeys(asked))

    def _computed(self, name: str) -> Sequence[str]:
        """Returns the names of the graph's outputs from which output `name` is made: for a table on
        the host, the indices and the new values of changed rows; for any other, `name` itself."""
        return self._row_outputs[name][1:] if name in self._row_outputs else (name,)

    def _bind_outputs(
        self, order: Sequence[str], request: Request, feeds: Mapping[str, Array], room: Room
    ) -> dict[str, Slot]:
        """Binds each output: to memory of `room` if its shape is known, to the memory of a kept
        state that the run changes in place, or else to new memory of onnxruntime. (Also the latter
        if onnxruntime expects another shape than its kernels compute.) Returns the outputs placed
        in the room."""
        kept = set(self._states.values()) if request.keep else set()
        names = [name for name in order if name not in kept | self._carried.keys()]
        direct = {n: s for n in names if (s := self._own.direct(n)) is not None}
        specs = {n: s for n, s in direct.items() if _may_be(self._inferred[n], s[1])}
        slots = dict(zip(specs, room.place(list(specs.values())), strict=True))
        in_place = self._changed_in_place(feeds) if request.keep else ()
        held = {self._states[name]: name for name in in_place}
        for name in order:
            if name in held:
                self._binding.put_value(name, self._state(held[name]))
            else:
                array = slots[name].array if name in slots else self._carried.get(name)
                self._binding.put(name, array)
        return slots

    def _changed_in_place(self, feeds: Mapping[str, Array]) -> frozenset[str]:
        """Returns the names of kept states that a run with these feeds changes in their own
        memory."""
        return self._in_place - feeds.keys()

    def _ship(self, name: str, value: ort.OrtValue, room: Room) -> Slot:
        """Copies an output from onnxruntime's memory to `room`, the memory for results."""
        return self._put(name, view_of(value, self._ports[name].dtype), room)

    def _shipped(
        self, name: str, value: ort.OrtValue | RowUpdate, feeds: Mapping[str, Array], room: Room
    ) -> Slot:
        """Copies an output of a run to `room`, the memory for results. For a table on the host, of
        which the run computes only changed rows, copies the whole table with these changes."""
        if not isinstance(value, RowUpdate):
            return self._ship(name, value, room)
        state = self._row_outputs[name][0]
        parts = self._own[state]
        slot = self._put(name, feeds.get(state, self._kept.array(state, parts)), room)
        value.write(slot.array)
        return slot

    def _put(self, name: str, array: Array, room: Room, rows: Rows = None) -> Slot:
        """Copies a tensor, or only the rows (start, end), to `room`, the memory for results; a
        value that is no tensor of numbers is returned as it is."""
        if self._ports[name].is_value:
            return Slot(NOWHERE, array)
        self._own.check(name, array.shape)
        part = array if rows is None else array[slice(*rows)]
        (slot,) = room.place([(part.dtype, part.shape)])
        slot.array[...] = part
        return slot

    def _lasting(self, name: str, value: ort.OrtValue | RowUpdate) -> ort.OrtValue | RowUpdate:
        """Returns a value of output `name` that can be kept as a state: a copy if the output is an
        input passed through, because the caller owns that memory."""
        passed = name in self._own.passed
        return copy_of(view_of(value, self._ports[name].dtype)) if passed else value

    def _shape(self, name: str, value: ort.OrtValue | RowUpdate) -> tuple[int, ...]:
        """Returns the global shape of an output. Errors: RankError if the shape of this rank's
        shard contradicts the layout."""
        if isinstance(value, RowUpdate):
            layout = self._ports[name].layout
            assert layout is not None, "the layout of a table is fixed"
            return layout.shape
        return self._own.check(name, value.shape())

    def _copied(self, name: str, part: Array) -> Any:
        """Returns a copy of this rank's shard that can be kept as a state."""
        return part if self._ports[name].is_value else copy_of(part)


def _may_be(inferred: Sequence[int | str | None], shape: Sequence[int]) -> bool:
    """True if `shape` agrees with `inferred`, the shape that onnxruntime inferred: equal in all
    known sizes, or `inferred` is empty, because the number of dimensions is unknown."""
    pairs = zip(inferred, shape, strict=False)
    return not inferred or (
        len(inferred) == len(shape) and all(a == b for a, b in pairs if isinstance(a, int))
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray)
