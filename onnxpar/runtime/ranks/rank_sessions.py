"""The onnxruntime sessions of one rank, one for each of its programs. A program is an ONNX file of
the rank, such as the training step and its evaluation."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from onnxpar.base.errors import ModelError
from onnxpar.runtime.profile.profile import ProfiledSessions, Record
from onnxpar.runtime.ranks import groups
from onnxpar.runtime.ranks.rank_failure import load_text
from onnxpar.runtime.session import openvino
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.options import SLOW_FUSIONS, SessionSpec, keep_double
from onnxpar.runtime.session.ort_session import load_ort_session


class RankSessions:
    """The sessions of a rank; each program is opened when it first runs.

    bundle   the sharded model
    world    the ranks, and which of them this one is
    spec     the options that the user gave
    threads  the number of threads that compute; 0: onnxruntime's default
    spin     True if these threads may spin while they wait
    """

    def __init__(
        self, bundle: Bundle, world: groups.World, spec: SessionSpec, threads: int, spin: bool
    ) -> None:
        self._bundle = bundle
        self._world = world
        self._spec = spec
        self._threads = threads
        self._spin = spin
        self._opened: dict[str, ort.InferenceSession] = {}
        self._profiled = ProfiledSessions()
        # Ranks that compute the whole model keep all fusions, to match onnxruntime bit by bit.
        self._slow = SLOW_FUSIONS if _is_split(bundle) else ()
        self._has_own_profile = bool(spec.fields.get("enable_profiling")) and not spec.profile

    def open(self, *programs: str) -> ort.InferenceSession:
        """Returns the session of a program, whose name is `programs` joined by "-" (see
        `Bundle.rank_file`); without any, the session of the main program. Errors: ModelError if it
        does not load."""
        program = "-".join(filter(None, programs))
        if program not in self._opened:
            self._opened[program] = self._open(program)
        return self._opened[program]

    def _open(self, program: str) -> ort.InferenceSession:
        """Opens the session of a program, which records a profile if the user asked for that."""
        rank = self._world.rank
        file, options = self._bundle.rank_file(rank, program), self._options()

        def make() -> ort.InferenceSession:
            return self._load(file, options)

        if not self._spec.profile:
            return make()
        folder = Path(self._spec.profile) / f"{rank}.{program}"
        return self._profiled.open(program, file, folder, options, make)

    def _options(self) -> ort.SessionOptions:
        """Returns the options of this rank's sessions."""
        bundle = self._bundle
        options = groups.session_options(self._world)
        self._spec.apply(options, self._world.rank, self._threads, self._spin)
        ports = (bundle.inputs, bundle.outputs)
        keep_double(options, *([p.dtype for p in each.values()] for each in ports))
        if bundle.step is not None:
            if options.execution_order == ort.ExecutionOrder.DEFAULT:
                # Runs nodes in the graph's order. By default, onnxruntime computes the gradients of
                # a bucket last, so that all values that they depend on stay in memory.
                options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
            # With the pattern, later runs allocate one block for everything, in addition to the
            # memory of the first run, which was allocated piece by piece and is never freed.
            options.enable_mem_pattern = False
        return options

    def _load(self, file: Path, options: ort.SessionOptions) -> ort.InferenceSession:
        """Opens a session. Errors: ModelError, with the node at fault if onnxruntime names it."""
        spec = self._spec
        providers = spec.providers or ()
        try:
            if spec.provider_options is None and options.intra_op_num_threads:
                providers = openvino.with_threads(providers, options.intra_op_num_threads)
            return load_ort_session(
                str(file),
                options,
                [*spec.all_disabled(), *self._slow],
                providers=providers or None,
                provider_options=spec.provider_options,
                enable_fallback=0,
            )
        except Exception as error:
            remedy = openvino.remedy(str(error), providers)
            raise ModelError(load_text(error, file) + remedy) from error

    def end_profile(self) -> Record:
        """Ends the recording; returns it. Its `file` is the profile that onnxruntime wrote because
        the user enabled onnxruntime's profiling, else empty."""
        file = self._opened[""].end_profiling() if self._has_own_profile else ""
        self._has_own_profile = False
        return {**self._profiled.end(), "file": file}


def _is_split(bundle: Bundle) -> bool:
    """True if ranks communicate, or if an input or an output is split; False if every rank computes
    the whole model."""
    ones = dict.fromkeys(bundle.symbols, 1)
    ports = (*bundle.inputs.values(), *bundle.outputs.values())
    layouts = (port.layout_at(ones) for port in ports)
    return bool(bundle.data.get("collectives")) or not all(
        layout is None or layout.is_whole for layout in layouts
    )
