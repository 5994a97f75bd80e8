"""Plans a model in one or several attempts, and keeps the best."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from onnxpar.base.errors import OpenSizesError, StrategyError
from onnxpar.base.log import LOG
from onnxpar.base.pass_times import OTHER, PREDICT, REPEAT
from onnxpar.compiler.expose import expose
from onnxpar.compiler.open_ports import open_ports
from onnxpar.compiler.pass_ import Pass, PassContext, Stage
from onnxpar.compiler.plan import Plan
from onnxpar.compiler.replay import replay, stay_whole
from onnxpar.cost.topology import ANY_HOST
from onnxpar.graph.interchange import metadata_of
from onnxpar.graph.paged_attention import UnpagedError
from onnxpar.graph.state_pairs import unpaired_text
from onnxpar.load.load import unread_inputs
from onnxpar.passes.write.split_ranks import check_open
from onnxpar.planner.attempt import Attempt, Planned
from onnxpar.planner.balance import fitting_shares
from onnxpar.planner.context import prepare
from onnxpar.planner.default_passes import may_overlap, passes_of
from onnxpar.planner.loader import Loader
from onnxpar.planner.memory_limit import within_hardware, within_limit
from onnxpar.planner.observer import Observer
from onnxpar.planner.options import Options, wanted_mesh
from onnxpar.planner.predicted_times import note_host, note_unsplit, note_weights, reckon_typical
from onnxpar.planner.run_passes import run_passes
from onnxpar.planner.timed_plan import time_here
from onnxpar.search.meshes import BETTER
from onnxpar.search.objective import OverLimit
from onnxpar.strategy.manual import MANUAL


@contextmanager
def _no_collector() -> Iterator[None]:
    """A block (or decorator) without Python's cycle collector: graphs stay alive, and each
    collection would scan all their nodes in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Planner:
    """Plans a model with the user's options, in one or several attempts, each on a fresh graph from
    the loader. `tried` lists the attempts and their outcomes."""

    def __init__(self, loader: Loader, options: Options, observer: Observer) -> None:
        self.loader, self.options, self.observer = loader, options, observer
        self.tried: list[tuple[Attempt, str]] = []
        self._seen: Observer | None = None

    def plan(self) -> Planned:
        """Returns the best plan. Errors: OnnxparError; then the observer has the state of the last
        attempt."""
        with self.options.times.of(OTHER):
            try:
                planned = self._paged_if_possible()
                self._seen = planned.seen
                self._note(planned)
                return planned
            finally:
                self.options.objective.patience.tell("")
                if self._seen is not None:
                    self.observer.keep(self._seen)

    def _note(self, planned: Planned) -> None:
        """Adds notes about the topology and the other attempts to a plan; corrects its times by
        runs of the unsplit model."""
        plan, topology = planned.plan, planned.ctx.sharding.costs.topology
        beaten = [
            f"{attempt.text(planned.attempt)}: {outcome}"
            for attempt, outcome in self.tried
            if attempt != planned.attempt
        ]
        if beaten:
            plan.notes.append(
                f"this plan is the best of {len(beaten) + 1} attempts "
                f"({planned.text(self._promises_times)}); " + "; ".join(beaten)
            )
        if not self._promises_times:
            plan.predicted, plan.costs = None, ANY_HOST
        else:
            time_here(plan, self.loader.path, topology, self.options.objective.patience.tell)
        note_host(plan, topology)

    @property
    def _promises_times(self) -> bool:
        """False if the plan must be the same on every host, so that its times mean nothing here."""
        return self.options.topology is not None or not self.options.on_any_host

    def _paged_if_possible(self) -> Planned:
        """Returns a plan with caches in pages, if the options ask for them. If the model's caches
        cannot be in pages, and the user did not ask for pages explicitly, returns a plan without.
        """
        attempt = Attempt.first(self.options)
        try:
            return self._fitting(attempt)
        except UnpagedError as error:
            if not self.options.pages_if_possible:
                raise
            planned = self._fitting(replace(attempt, page_size=0))
            if planned.plan.states:
                planned.plan.notes.append(f"caches are not in pages, because {error.reason}")
            return planned

    def _fitting(self, attempt: Attempt) -> Planned:
        """Returns a plan within the memory limit; if there is none, within the memory of the
        hardware."""
        options, topology = self.options, self.options.topology
        if attempt.objective.memory is not None:
            is_bounded = topology is not None and bool(topology.devices)
            is_free = options.devices is not None and wanted_mesh(options) is None
            return within_limit(attempt, is_free and not is_bounded, self._balanced)
        planned = self._balanced(attempt)
        if options.preset == MANUAL or not self._promises_times:
            return planned
        return within_hardware(planned, topology, self._balanced)

    def _balanced(self, attempt: Attempt) -> Planned:
        """Returns a plan; with --balance, one in which each rank's share of the work fits into its
        memory."""
        if self.options.balance:
            return fitting_shares(attempt, self.options.topology, self.make)
        return self._with_hidden_sums(attempt)

    def _with_hidden_sums(self, attempt: Attempt) -> Planned:
        """Makes one or two plans of an attempt; returns the faster one, by predicted time. The
        search for the first counts sums of gradients between hosts in full; the search for the
        second assumes that they run beside compute. The second is made only for training steps that
        overlap communication with compute, if a search decides."""
        planned = self.make(attempt)
        is_step = planned.plan.step is not None and planned.ctx.model.sizes is None
        was_searched = planned.ctx.request.solution is not None
        may_hide = is_step and was_searched and may_overlap(self.options)
        if not may_hide or attempt.objective.any_fit:
            return planned
        objective = replace(attempt.objective, hides_sums=True)
        try:
            hiding = self.make(replace(attempt, objective=objective))
        except OverLimit:  # the first plan fits
            return planned
        assert planned.plan.predicted is not None and hiding.plan.predicted is not None
        gains = hiding.plan.predicted.total < planned.plan.predicted.total * (1 - BETTER)
        return hiding if gains else planned

    def make(self, attempt: Attempt) -> Planned:
        """Returns the plan of one attempt; if open sizes do not allow it, of this attempt with more
        nodes whole. Errors: OnnxparError."""
        outcome: Planned | Attempt = attempt
        try:
            while isinstance(outcome, Attempt):
                outcome = self._run(outcome)
        except OverLimit as error:
            self._tell(attempt, str(error))
            raise
        self._tell(outcome.attempt, outcome.text(self._promises_times))
        return outcome

    def _tell(self, attempt: Attempt, outcome: str) -> None:
        """Records the outcome of an attempt for the notes, unless the attempt only served the
        search for a number of ranks."""
        if self._is_shown(attempt):
            self.tried.append((attempt, outcome))

    def _is_shown(self, attempt: Attempt) -> bool:
        return attempt.devices == self.options.devices

    @_no_collector()
    def _run(self, attempt: Attempt) -> Planned | Attempt:
        """Makes a plan. If open sizes do not allow it, returns the attempt to make instead. Errors:
        OnnxparError."""
        options, tell = attempt.on(self.options), self.options.objective.patience.tell
        model, seen = self.loader.model(options, attempt.whole), Observer()
        if self._is_shown(attempt):
            seen = self._seen = self.observer.begin()
        unread = unread_inputs(model)
        tell("analysing the model")
        steps = passes_of(options, model)
        ctx = prepare(model, options, steps, seen)
        steps = [step for step in steps if step.stage is not Stage.REWRITE]
        plan = run_passes(model, ctx, steps, seen, options.check_layouts, options.times)
        assert plan is not None
        try:
            self._repeat(plan, ctx, [s for s in steps if s.stage is Stage.LOWER], seen)
        except OpenSizesError as error:
            more = stay_whole(error.nodes, model.graph, ctx, model.whole)
            if not more:
                raise
            LOG.debug("planning again, with %d nodes whole: %s", len(more), error)
            return replace(attempt, whole={**attempt.whole, **more})
        self._complete(plan, ctx, unread)
        return Planned(attempt, plan, ctx, seen)

    def _repeat(self, plan: Plan, ctx: PassContext, passes: Sequence[Pass], seen: Observer) -> None:
        """Repeats the passes of the stage LOWER at the other sample sizes of open dimensions; gives
        the plan formulas for open sizes, and its costs at typical sizes. Errors: OpenSizesError."""
        model, times = ctx.model, self.options.times
        if model.sizes is None:
            return
        self.options.objective.patience.tell("repeating the plan at other sizes")
        with times.of(REPEAT):
            replay(model, ctx, passes)
        check_open(model.graph, ctx)
        with times.of(PREDICT):
            reckon_typical(plan, model, ctx, passes, seen)
        open_ports(plan, ctx)

    def _complete(self, plan: Plan, ctx: PassContext, unread: Sequence[str]) -> None:
        """Adds to a plan what depends on its model and options: metadata, notes, exposed tensors.
        `unread` are inputs that no node reads. Errors: StrategyError if an op has no rule and
        --strict is given."""
        options, model, path = self.options, ctx.model, self.loader.path
        plan.metadata = metadata_of(model.header)
        if plan.step is not None and plan.step.deal is None and options.request is not None:
            plan.request = {"file": path.name, "options": options.request, "sha256": None}
        if options.exposed:
            expose(plan, ctx, options.exposed)
        note_unsplit(plan, ctx.sharding)
        if unread:
            names = ("input " if len(unread) == 1 else "inputs ") + ", ".join(map(repr, unread))
            plan.notes.append(f"no node reads the {names}, but runs need a value")
        if model.sizes is not None and options.fusion not in (None, "none"):
            plan.notes.append(
                "--fusion fuses only all-reduces, because the model has open sizes: shards that "
                "are equal at one size may differ at another. To fuse other collectives too, fix "
                f"the sizes with {model.sizes.flags}"
            )
        note_weights(plan, ctx.sharding)
        if plan.unpaired:
            warnings.warn(unpaired_text(plan.unpaired), stacklevel=2)
        unruled = [w for w in plan.whole if w.is_lack]
        if options.strict and unruled:
            first = unruled[0]
            raise StrategyError(
                f"--strict: {len(unruled)} {'node has' if len(unruled) == 1 else 'nodes have'} no "
                f"sharding rule and would run whole on every rank, the first of them {first.op} "
                f"'{first.node}' ({first.reason}); `onnxpar plan` without --strict lists them"
            )
