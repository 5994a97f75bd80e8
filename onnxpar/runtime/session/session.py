"""A sharded model as one session, with the interface of onnxruntime.InferenceSession."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError, ModelError, OnnxparError, RunError
from onnxpar.base.own_folder import OwnFolder
from onnxpar.runtime.launch import launch
from onnxpar.runtime.profile.profile import Record
from onnxpar.runtime.ranks.closing import Closing
from onnxpar.runtime.ranks.cores import BINDINGS
from onnxpar.runtime.ranks.planned_run import PlannedRun, Request
from onnxpar.runtime.ranks.ranks import PartsOf, ProcessRanks, Ranks, StartRanks
from onnxpar.runtime.session.bundle import Bundle, NodeArg, Sizes
from onnxpar.runtime.session.checks import (
    CROWD,
    check_bind,
    check_elsewhere,
    check_feeds,
    check_kept,
    check_names,
    check_ranks_per_numa,
    check_replica,
    check_table_cache,
    check_threads,
    check_timeout,
)
from onnxpar.runtime.session.interface import Interface
from onnxpar.runtime.session.options import SessionSpec, run_spec
from onnxpar.runtime.session.shards import PortParts
from onnxpar.runtime.states.states import States

if TYPE_CHECKING:
    import onnxruntime as ort

    from onnxpar.runtime.profile.trace import Trace


class _Checked(NamedTuple):
    """A run that passed the checks, so that a run that repeats it needs none.

    run      the record that decides whether a later run repeats this one
    names    the names of the results, in order
    request  the request to the ranks
    """

    run: PlannedRun
    names: Sequence[str]
    request: Request


class Session(Interface, Closing):
    """Runs a sharded model on its ranks. Inputs and outputs are global arrays, like those of the
    unsplit model."""

    def __init__(
        self,
        bundle: Bundle,
        ranks: Ranks,
        scratch: OwnFolder | None = None,
        sess_options: ort.SessionOptions | None = None,
    ) -> None:
        self._bundle = bundle
        super().__init__(sess_options)
        self._ranks = ranks
        self._lock = threading.RLock()
        self._kept: dict[str, tuple[int, ...]] = {}
        self._last: _Checked | None = None
        self._is_recorded = scratch is not None
        self._sizes_of_runs: list[Sizes] = []
        self._seconds_of_runs: list[float] = []
        self._parts = PortParts(bundle)
        self._finalizer = weakref.finalize(self, _close_in, os.getpid(), ranks, scratch)

    def __repr__(self) -> str:
        mesh = self._bundle.mesh
        return f"<{type(self).__name__} of {self._bundle.path}: {mesh.size} ranks (mesh {mesh})>"

    def get_inputs(self) -> list[NodeArg]:
        """Returns the inputs that must be fed, with the shapes of the unsplit model."""
        return [port.arg for port in self._bundle.inputs.values() if not port.has_default]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Returns the inputs that have default values, with the shapes of the unsplit model."""
        return [port.arg for port in self._bundle.inputs.values() if port.has_default]

    def get_outputs(self) -> list[NodeArg]:
        """Returns the outputs, with the shapes of the unsplit model."""
        return [port.arg for port in self._bundle.outputs.values()]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._bundle.mesh.size

    def check_feeds(self, feeds: Mapping[str, Any]) -> None:
        """Raises an InputError if a run would refuse these feeds."""
        check_feeds(self._bundle, feeds, self._kept)

    def output_shapes(self, feeds: Mapping[str, Any]) -> dict[str, tuple[int | None, ...]]:
        """Returns the global shapes of the outputs for these feeds; data-dependent sizes are None.
        Errors: InputError if the shapes of feeds contradict each other."""
        sizes = dict(zip(self._bundle.symbols, self._sizes(feeds), strict=True))
        return {name: port.shape_at(sizes) for name, port in self._bundle.outputs.items()}

    @property
    def apart(self) -> frozenset[str]:
        """The evaluation outputs of a training step; fetch them in a run without other outputs."""
        return self._bundle.apart

    def exchange(self, payload: bytes) -> list[bytes]:
        """Under a launcher, returns the payloads of all ranks' processes, by rank; all of them must
        call this. Otherwise, returns [payload]. Errors: RankError if ranks have ended or do not
        answer."""
        with self._lock:
            self._ranks.check_usable()
            return self._ranks.exchange(payload)

    def write_log(self, lines: Sequence[str]) -> None:
        """Adds lines to the output of each rank, `rank.N/stdout.log` in the `log_dir` of the
        session; does nothing without one. Under a launcher, each process writes to the log of its
        own rank. Errors: RankError if the session is closed; OnnxparError if a log cannot be
        written."""
        with self._lock:
            self._ranks.check_usable()
            self._ranks.write_log("".join(f"{line}\n" for line in lines))

    @property
    def states(self) -> States:
        """The states that the ranks keep between runs, to read and write them."""
        return States(self)

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: ort.RunOptions | None = None,
        *,
        keep_states: bool = False,
    ) -> list[Array]:
        """Runs all ranks and returns the named outputs, or all, as global arrays.

        With `keep_states`, outputs of state pairs stay on their ranks and are the inputs of later
        runs that do not feed these inputs; such outputs are returned only if they are named.
        Evaluation outputs of a training step need a run without other outputs, which changes no
        state. Fields and config entries of `run_options` apply on every rank; setting `terminate`
        during a run has no effect. Threads may share a session: one run follows another.

        Errors: InputError for wrong feeds; RunError if the run failed on a rank: states are then as
        before, and further runs are possible; RankError if a rank died, stopped or disagreed: the
        session is then closed.
        """
        with self._lock:
            names, request, parts = self._run(output_names, keep_states, input_feed, run_options)
            whole = {name: self._assemble(name, parts, request.sizes) for name in request.fetch}
        return [whole[name] for name in names]

    def run_steps(
        self,
        output_names: Sequence[str],
        input_feed: Mapping[str, Any],
        carried: Mapping[str, str],
        times: int,
    ) -> list[list[Array]]:
        """Runs all ranks several times in one call, and returns the named outputs of each run, as
        global arrays.

        `carried` has, by input, the output of the run before that is the value of the input in each
        run but the first. States are kept, as in `run` with `keep_states`, and must be changed in
        place, like a decoder's caches in pages.

        Errors: those of `run`; InputError also for outputs that are not whole on all ranks or have
        another shape or dtype than the input, and for states that are not changed in place.
        """
        if times < 1 or not carried:
            raise InputError(f"times is {times}, carried {carried}; give at least 1, and an input")
        with self._lock:
            names, request, parts = self._run(output_names, True, input_feed, None, times, carried)
            each = [
                {n: {r: a[i] for r, a in own.items()} for n, own in parts.items()}
                for i in range(times)
            ]
            return [[self._assemble(n, step, request.sizes) for n in names] for step in each]

    def _run(
        self,
        output_names: Sequence[str] | None,
        keep_states: bool,
        input_feed: Mapping[str, Any],
        run_options: ort.RunOptions | None,
        times: int = 1,
        carried: Mapping[str, str] | None = None,
    ) -> tuple[Sequence[str], Request, PartsOf]:
        """Runs all ranks; returns (names of the results in order, the request, the shards of the
        outputs). The caller holds the lock."""
        start = time.perf_counter()
        self._ranks.check_usable()
        last, asked = self._last, (output_names, keep_states, times, carried or {})
        is_plain = run_options is None and (output_names is None or isinstance(output_names, list))
        if last and is_plain and last.run.is_again(asked, input_feed, kept=self._kept):
            (_, names, request), feeds = last, input_feed
        else:
            names, request, feeds = self._checked(
                output_names, keep_states, input_feed, run_options
            )
            if carried:
                request = self._several(request, feeds, carried, times)
            asked = copy(output_names), keep_states, times, request.carried
            run = PlannedRun.of(asked, feeds, kept=self._kept)
            self._last = _Checked(run, names, request) if is_plain else None
        try:
            parts = self._ranks.run(request, feeds)
        except RunError as error:
            raise self.blame(error, feeds) from error
        if self._is_recorded:
            self._seconds_of_runs += [(time.perf_counter() - start) / times] * times
            self._sizes_of_runs += [request.sizes] * times if request.sizes else []
        if request.keep:
            self._kept.update(self._ranks.kept_shapes)
        return names, request, parts

    def _several(
        self, request: Request, feeds: Mapping[str, Array], carried: Mapping[str, str], times: int
    ) -> Request:
        """Returns the request to run `times` times with these carried outputs. Errors: InputError
        if a state is not changed in place, or if an output cannot be carried."""
        bundle = self._bundle
        others = bundle.states.keys() - bundle.in_place
        if others:
            raise InputError(
                f"state {min(others)!r} is not changed in place, so that a run which fails could "
                "not be undone with those before it; call run for each step"
            )
        sizes = dict(zip(bundle.symbols, request.sizes, strict=True))
        for name, output in carried.items():
            if name not in feeds or output not in bundle.outputs:
                raise InputError(
                    f"{output!r} cannot be carried to {name!r}: name an output, and an input that "
                    "is fed"
                )
            before, after = feeds[name], bundle.outputs[output]
            if not self.is_whole(name) or not self.is_whole(output):
                raise InputError(
                    f"{output!r} or {name!r} is split over ranks, so that these cannot carry it; "
                    "call run for each step"
                )
            if after.shape_at(sizes) != before.shape or after.dtype != before.dtype:
                raise InputError(
                    f"{output!r} is {after.dtype}{list(after.shape_at(sizes))}, and {name!r} is "
                    f"{before.dtype}{list(before.shape)}; only equal ones can be carried"
                )
        return replace(request, times=times, carried=dict(carried))

    def is_whole(self, name: str) -> bool:
        """True if all ranks have the whole of an input or output, whatever the open sizes are."""
        bundle = self._bundle
        port = bundle.inputs.get(name) or bundle.outputs[name]
        layout = port.layout_at(dict.fromkeys(bundle.symbols, 8))
        return layout is not None and layout.is_whole

    def _checked(
        self,
        output_names: Sequence[str] | None,
        keep_states: bool,
        input_feed: Mapping[str, Any],
        run_options: ort.RunOptions | None,
    ) -> tuple[Sequence[str], Request, Mapping[str, Array]]:
        """Checks the arguments of a run; returns (names of the results in order, the request to the
        ranks, the feeds as arrays). Errors: InputError if names, dtypes or shapes are not of the
        model."""
        bundle = self._bundle
        state_outputs = set(bundle.states.values()) if keep_states else set()
        default = [name for name in self._names(None) if name not in state_outputs]
        names = check_names(bundle, output_names, default)
        apart = [name for name in names if name in bundle.apart]
        if apart and len(apart) < len(names):
            raise InputError(
                f"{apart[0]!r} is an output of the evaluation program, the others are of the "
                "training step; fetch them in separate runs"
            )
        known = {*self._kept, *(bundle.not_evaluated if apart else ())}
        feeds = check_feeds(bundle, input_feed, known)
        check_kept(bundle, {n: s for n, s in self._kept.items() if n not in feeds})
        fetch, keep = list(dict.fromkeys(names)), keep_states and not apart
        sizes = self._sizes(feeds)
        bundle.check_program(sizes)
        request = Request(fetch, keep, run_spec(run_options), sizes)
        return names, request, feeds

    def end_profile(self, path: str | os.PathLike[str], warm_up: int = 0) -> Trace | None:
        """Ends the recording, writes a trace of all ranks to a file for chrome://tracing and
        Perfetto, and returns the trace. Leaves out the first `warm_up` runs, but never the last
        run.

        Under a launcher, only rank 0 writes; other ranks return None. Errors: InputError if the
        session was made without `profile`; OnnxparError if the file cannot be written.
        """
        return self._write_trace(self._end_records(), path, warm_up)

    def end_profiling(self) -> str:
        """Ends the recording, and returns the name of the file with it.

        With `sess_options.enable_profiling`, the file is onnxruntime's own profile of rank 0 (under
        a launcher, of this rank); the profiles of other ranks have the rank in their names. With
        `profile`, the file is the trace of all ranks, in the current folder. With neither, the name
        is "", as in onnxruntime. Errors: OnnxparError if the file cannot be written.
        """
        records = self._end_records()
        if records[0].get("file"):
            return str(records[0]["file"])
        if not records[0]["programs"]:
            return ""
        name = time.strftime("onnxpar_profile_%Y-%m-%d_%H-%M-%S.json")
        self._write_trace(records, name)
        return name

    def _end_records(self) -> Sequence[Record]:
        """Ends the recording; returns the records of all ranks."""
        with self._lock:
            self._ranks.check_usable()
            return self._ranks.end_profile()

    def _write_trace(
        self, records: Sequence[Record], path: str | os.PathLike[str], warm_up: int = 0
    ) -> Trace | None:
        """Writes the trace of these records to a file; returns it, or None on a rank that has only
        its own record. Errors: InputError if nothing is recorded."""
        if not records[0]["programs"]:
            raise InputError("nothing is recorded; make the session with profile=True")
        if len(records) < self._bundle.mesh.size:
            return None
        from onnxpar.runtime.profile.merge_profiles import merge
        from onnxpar.runtime.profile.trace import write_trace

        of_runs = self._sizes_of_runs, self._seconds_of_runs
        trace = merge(self._bundle, records, warm_up, *of_runs)
        write_trace(trace, path)
        return trace

    def _sizes(self, feeds: Mapping[str, Array]) -> Sizes:
        """Returns the values of the open sizes in a run, from the shapes of its feeds and of kept
        states."""
        if not self._bundle.symbols:
            return ()
        inputs = self._bundle.inputs
        fed = {n: a.shape for n, a in feeds.items() if inputs[n].shape is not None}
        return self._bundle.sizes({**self._kept, **fed}, self._kept.keys() - fed.keys())

    def check_alive(self) -> None:
        """Raises a RankError if a rank of this host has ended, between calls, too; the error names
        the rank, and the session ends."""
        with self._lock:
            self._ranks.check_alive()

    def blame(self, error: OnnxparError, feeds: Mapping[str, Any]) -> OnnxparError:
        """Returns the error to raise for a failed run: `error` itself or, if an index in a feed is
        out of range, an InputError that names this index."""
        for lookup in self._bundle.lookups:
            fed = feeds.get(lookup.input)
            fault = lookup.fault(fed) if isinstance(fed, np.ndarray) else None
            if fault is not None:
                return InputError(fault)
        return error

    def close(self) -> None:
        """Ends the ranks; the session cannot run afterwards. May be called twice."""
        with self._lock:
            self._finalizer()
            if self._pool is not None:  # waiting runs fail: the session is closed
                self._pool.shutdown(wait=False)
                self._pool = None

    def _assemble(self, name: str, parts: PartsOf, sizes: Sizes) -> Array:
        """The global array of an output, from its shards."""
        return self._parts.at(sizes)[name].assemble(parts[name])


class InferenceSession(Session):
    """`onnxruntime.InferenceSession` for a `model.par` folder.

    Starts one process per rank on this host. Under a launcher such as mpirun (see `launch`), this
    process already is a rank: then all processes must make the same calls with the same feeds, and
    each gets the global outputs.

    timeout              longest wait for a rank, in seconds, not counting its compute time
    log_dir              folder for the output of ranks, `rank.N/stdout.log` and `stderr.log`
    bind_address         the only address that ranks listen on
    threads              threads of each rank; default: `sess_options.intra_op_num_threads`, or the
                         number of cores divided by the number of ranks
    bind                 "cores": a rank runs on its cores alone; "numa": on all cores of their NUMA
                         nodes; "none": on any. Not under a launcher, which binds ranks itself
    ranks_per_numa       number of ranks on each NUMA node; default: each rank is on the node where
                         it gets most cores, so equal nodes have equally many
    replica, replicas    this is session number `replica`, from 0, of so many that run at the same
                         time and divide the cores; default: the only one
    config               additional session config entries
    libraries            custom-op libraries; repeat those of `sess_options` here, because
                         onnxruntime does not reveal them
    table_dir            folder for the files of tables on the host, which vanish with the session;
                         default: `path`
    table_cache          most bytes of rows of tables on the host that a rank keeps in memory;
                         default: 256 MiB
    profile              record each node that onnxruntime runs until `end_profile`, up to a million
                         per rank
    verify               first compare every byte of the folder with its digests; by default, only
                         samples of large files
    start_ranks          starts the ranks elsewhere than on this host, such as `onnxpar.ray.Actors`
    disabled_optimizers  onnxruntime's optimizers to switch off, by name

    `enable_fallback` and `read_config_from_model` must stay off. Errors: ModelError for a folder
    that is not a sharded model; RankError if a rank does not start.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: ort.SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        timeout: float = 60.0,
        log_dir: str | os.PathLike[str] | None = None,
        bind_address: str | None = None,
        threads: int | None = None,
        bind: str = BINDINGS[0],
        ranks_per_numa: int | None = None,
        replica: int = 0,
        replicas: int = 1,
        config: Mapping[str, str] | None = None,
        libraries: Sequence[str | os.PathLike[str]] = (),
        table_dir: str | os.PathLike[str] | None = None,
        table_cache: float | str | None = None,
        profile: bool = False,
        verify: bool = False,
        start_ranks: StartRanks | None = None,
        enable_fallback: bool | int = False,
        disabled_optimizers: Iterable[str] | None = None,
        read_config_from_model: bool | int = False,
    ) -> None:
        if isinstance(path_or_bytes, bytes):
            raise ModelError(
                "a sharded model is a folder, not bytes: write it with onnxpar.shard(bytes, "
                "'model.par', devices=N), then open that folder"
            )
        if enable_fallback:
            self.enable_fallback()
        if read_config_from_model:
            raise InputError("read_config_from_model: give sess_options instead")
        check_timeout(timeout)
        check_replica(replica, replicas)
        launched = launch.launched_rank() if start_ranks is None else None
        path = Path(path_or_bytes)
        bundle = Bundle.load(path) if launched is None else None  # a rank may have to fetch it
        spec = SessionSpec.of(
            sess_options,
            config=dict(config or {}),
            libraries=libraries,
            providers=providers,
            provider_options=provider_options,
            disabled_optimizers=list(disabled_optimizers or ()),
            table_dir="" if table_dir is None else os.path.abspath(table_dir),
            table_cache=check_table_cache(table_cache),
            verify=verify,
            bind=check_bind(bind),
            ranks_per_numa=check_ranks_per_numa(ranks_per_numa, bind, launched is not None),
            replica=replica,
            replicas=replicas,
        )
        if threads is not None:
            most = CROWD * (os.cpu_count() or 1) if start_ranks is None else math.inf
            fields = {**spec.fields, "intra_op_num_threads": check_threads(threads, most)}
            spec = replace(spec, fields=fields)

        if start_ranks is not None:
            of_host = {"log_dir": log_dir, "bind_address": bind_address}
            check_elsewhere({**of_host, "ranks_per_numa": ranks_per_numa}, bind)

        def start(spec: SessionSpec) -> Ranks:
            if bundle is not None:
                if start_ranks is not None:
                    return start_ranks(bundle, spec, timeout)
                address = bind_address or launch.bind_address()
                return ProcessRanks(bundle, spec, timeout, log_dir, address)
            assert launched is not None, "only under a launcher, a session does not read the plan"
            from onnxpar.runtime.launch.launched_rank import LaunchedRank

            return LaunchedRank(path, spec, launched, timeout, log_dir, bind_address)

        self._spec, self._profile, self._start = spec, profile, start
        ranks, scratch = self._started()
        super().__init__(ranks.bundle, ranks, scratch, sess_options)

    def set_providers(
        self,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """Ends the ranks and starts new ones with these execution providers. Kept states and
        profiles that were not ended are lost. Errors: RankError if a rank does not start; then the
        session is closed."""
        with self._lock:
            self._ranks.check_usable()
            self._finalizer()
            self._kept.clear()
            self._spec = replace(self._spec, providers=providers, provider_options=provider_options)
            self._ranks, scratch = self._started()
            self._finalizer = weakref.finalize(self, _close_in, os.getpid(), self._ranks, scratch)

    def _started(self) -> tuple[Ranks, OwnFolder | None]:
        """Starts new ranks; returns (the ranks, the folder for their recordings), None for the
        latter if nothing is recorded."""
        if not self._profile:
            return self._start(replace(self._spec, profile="")), None
        scratch = OwnFolder()
        try:
            return self._start(replace(self._spec, profile=str(scratch.path))), scratch
        except BaseException:
            scratch.close()
            raise


def _close_in(owner: int, ranks: Ranks, scratch: OwnFolder | None) -> None:
    """Closes the ranks and removes the folder of their recordings, if there is one. Does nothing in
    a process forked from `owner`, the process that made the session."""
    if os.getpid() == owner:
        ranks.close()
        if scratch is not None:
            scratch.close()
