"""The command `check`: shards a model, runs it on its ranks, and compares its outputs with those of
the unsplit model."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.errors import InputError, ModelError, OnnxparError, RankError
from onnxpar.base.own_folder import OwnFolder
from onnxpar.base.shown import Shown, text_of
from onnxpar.compiler.plan import Plan
from onnxpar.compiler.ranges import Range, integer_ranges
from onnxpar.graph.cache_sizes import settled
from onnxpar.graph.interchange import header_of
from onnxpar.graph.training_spec import Step
from onnxpar.graph.typical import Typical
from onnxpar.layout.layout import dim_axes
from onnxpar.layout.symbols import Polynomial
from onnxpar.load.read_file import read_proto
from onnxpar.planner import sharder
from onnxpar.planner.context import load_model
from onnxpar.planner.options import Options
from onnxpar.planner.paging import refuse_paging
from onnxpar.report.compare import Closeness, Comparison, Report, compare, quietly
from onnxpar.report.compare_each import compare_each, inner_tensors
from onnxpar.report.compare_training import compare_training, judge_compressed, judge_gradients
from onnxpar.report.finite_differences import compare_gradients
from onnxpar.report.plan_text import plan_lines
from onnxpar.report.replicas import compare_replicas, compare_trained_replicas
from onnxpar.report.unsplit import Unsplit
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.checks import check_array, check_timeout
from onnxpar.runtime.session.feeds import make_feeds, read_given
from onnxpar.runtime.session.session import InferenceSession
from onnxpar.runtime.states.first_states import ZERO
from onnxpar.strategy.manual import MANUAL
from onnxpar.trainer.rates import check_rate
from onnxpar.trainer.trainer import Trainer, check_step

STEPS, RATE = 50, 0.01
"""Default number of steps, and learning rate, of a check of training."""
NOTHING = "no output is replicated on several ranks, so there is nothing to compare"
Inputs = str | os.PathLike[str] | Mapping[str, Any] | None
"""The user's inputs: an .npz file, arrays by input name, or None."""


_RESIZES: tuple[Callable[[int], int], ...] = (
    *(partial(lambda part, n: max(n // part, 1), 2**i) for i in range(7)),
    *(partial(lambda size, n: size, 2**i) for i in range(6, 10)),
)
"""For models that do not run at the typical sizes: functions from an open size of the plan's
example to the size to try next. They return the same size, then smaller ones, and then large ones
that are equal for all symbols, for models that need many elements."""
_SECONDS = 5.0
"""Seconds for trying further sizes, once the outputs agree at one."""
_MOST_ELEMENTS = 1 << 25
"""Random inputs have at most this many elements, at larger sizes than in the plan's example."""


@dataclass(frozen=True)
class Way:
    """Options of a check; `onnxpar.check` describes them."""

    inputs: Inputs = None
    seed: int = 0
    each: bool = False
    train: bool = False
    steps: int | None = None
    lr: float | None = None
    rtol: float | None = None
    atol: float | None = None
    timeout: float = 60.0
    log_dir: str | os.PathLike[str] | None = None


@dataclass(frozen=True)
class Check(Shown):
    """The result of a check.

    report     the comparison of every output
    title      the heading, for a training run
    made_up    descriptions of the inputs that were random because the user gave none
    elsewhere  a sentence on other open sizes: that the outputs agree there, or that `report` has
               the first sizes at which they differ; for a training run, the gradients that were not
               compared with differences of the loss
    """

    plan: Plan
    report: Report
    title: str = ""
    made_up: Sequence[str] = ()
    elsewhere: str = ""

    @property
    def ok(self) -> bool:
        """True if all outputs are within their tolerances."""
        return self.report.ok

    def to_json(self) -> dict[str, Any]:
        """Returns the check as JSON value, with the plan as in plan.json."""
        told = {"made_up": list(self.made_up), "elsewhere": self.elsewhere}
        return {**self.report.to_json(), **told, "plan": self.plan.to_json()}

    def text(self) -> str:
        """Returns what the command prints: the plan, and a table of outputs with their errors."""
        lines = plan_lines(self.plan.to_json(), full=not self.title)
        table = self.report.text() if self.report.rows else NOTHING
        made_up = [f"random inputs: {'; '.join(self.made_up)}"] if self.made_up else []
        elsewhere = [self.elsewhere] if self.elsewhere else []
        return "\n".join([*lines, self.title, *made_up, table, *elsewhere])


@text_of.register
def _(check: Check) -> str:
    return check.text()


def check_model(
    model: Path,
    options: Options,
    way: Way,
    progress: Callable[[int], None] | None = None,
    tell: Callable[[str], None] = quietly,
) -> Check:
    """Shards a model into a temporary folder, runs it, and compares it with the unsplit model.

    way       what to run and compare, and with which tolerances
    progress  called with the number of bytes of weights that were written since the last call
    tell      called with a text before each step, and with an empty text at the end

    Errors: OnnxparError.
    """
    try:
        return _checked(model, options, way, progress, tell)
    finally:
        tell("")


def _checked(
    model: Path,
    options: Options,
    way: Way,
    progress: Callable[[int], None] | None,
    tell: Callable[[str], None],
) -> Check:
    """`check_model` without the last call of `tell`; takes its parameters."""
    refuse_paging(options, "check")
    is_manual = options.preset == MANUAL
    close = _tolerance(way, is_manual)
    if way.train:
        return _check_training(model, options, way)
    exposed = inner_tensors(model) if way.each else ()
    with _own_place(model) as par:
        options = replace(options, replicas=True, exposed=exposed)
        tell("sharding")
        plan = sharder.shard(model, par, options, progress)
        bundle = Bundle.load(par)

        def judged(report: Report) -> Report:
            if plan.step is None or close is not None or way.each:
                return report
            return judge_compressed(judge_gradients(report, plan.step), plan.step)

        def compared(session: InferenceSession, feeds: Mapping[str, Any]) -> Report:
            if way.each:
                tell("comparing every tensor")
                return compare_each(model, session, feeds, close)
            if is_manual:
                tell(f"running {session.ranks} ranks")
                return compare_replicas(session, feeds, close)
            return compare(model, session, feeds, close=close, timed=True, tell=tell)

        def opened() -> InferenceSession:
            try:
                return InferenceSession(par, timeout=way.timeout, log_dir=way.log_dir)
            except RankError:
                if not is_manual:
                    Unsplit(model).close()  # raises if that does not load either
                raise

        with opened() as session:
            first: Exception | None = None
            is_free = True
            for sizes in _sizes_to_try(plan, bundle):
                try:
                    feeds, made_up, is_free = _feeds(model, options, way, plan, bundle, sizes)
                    report = _beside(judged(compared(session, feeds)), plan, bundle, feeds)
                    break
                except (ModelError, InputError) as error:  # a size may be too large or small
                    first = first or error
                    if not is_free:
                        raise
            else:
                assert first is not None
                raise first
            elsewhere = ""
            if is_free and report.ok and not (is_manual or way.each):

                def at(sizes: Mapping[str, int]) -> tuple[Report, list[str]]:
                    feeds, made_up, _ = _feeds(model, options, way, plan, bundle, sizes)
                    return judged(compare(model, session, feeds, close=close)), made_up

                tell("comparing at other sizes")
                report, made_up, elsewhere = _elsewhere(plan, at, report, made_up)
    own = [port for port in plan.outputs if port.name not in set(exposed)]
    plan = replace(plan, outputs=own)
    given = made_up if way.inputs is not None or not report.ok else ()
    return Check(plan, report, made_up=given, elsewhere=elsewhere)


def _beside(report: Report, plan: Plan, bundle: Bundle, feeds: Mapping[str, Any]) -> Report:
    """Returns the report with the plan's predicted times, if they are for the sizes of these
    feeds."""
    times, predicted = report.times, plan.predicted
    arrays = {name: array.shape for name, array in feeds.items() if isinstance(array, np.ndarray)}
    sizes = dict(zip(bundle.symbols, bundle.sizes(arrays), strict=True))
    is_typical = [dict(typical) for typical, _ in plan.typical] in ([], [sizes])
    if times is None or predicted is None or not is_typical:
        return report
    return replace(report, times=replace(times, predicted=(predicted.one_rank, predicted.total)))


def _elsewhere(
    plan: Plan,
    at: Callable[[Mapping[str, int]], tuple[Report, list[str]]],
    report: Report,
    made_up: list[str],
) -> tuple[Report, list[str], str]:
    """Compares the outputs also at size 1 and at the compiler's sample sizes: odd and even, small
    and large, on both sides of the numbers with which the model compares sizes. Returns the results
    at the first sizes where the outputs differ, else `report` and `made_up`; and a sentence about
    this.

    at               compares at given sizes
    report, made_up  the results of `at` at the usual sizes
    """
    if not plan.samples:
        return report, made_up, ""
    wanted = [dict.fromkeys(plan.samples[0], 1), *reversed(plan.samples)]
    began, compared, refused = time.monotonic(), 0, 0
    for sizes in wanted:
        if time.monotonic() - began > _SECONDS:
            break
        try:
            each, inputs = at(sizes)
        except (ModelError, InputError):  # not sizes of the model, or refused by name
            refused += 1
            continue
        compared += 1
        if not each.ok:
            text = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
            return each, inputs, f"the outputs differ at {text}; at the typical sizes, they agree"
    left = len(wanted) - compared - refused
    told = [f"outputs also agree at {compared} other combinations of sizes"]
    told += [f"{refused} were refused"] if refused else []
    told += [f"{left} were left out after {_SECONDS:g} s"] if left else []
    return report, made_up, "; ".join(told)


@contextmanager
def _own_place(model: Path) -> Iterator[Path]:
    """A block with a path for a sharded model in a temporary folder. Errors in it name `model` in
    place of that path, which is gone by the time the user reads them."""
    with OwnFolder() as folder:
        par = folder / "model.par"
        try:
            yield par
        except OnnxparError as error:
            error.args = (str(error).replace(str(par), str(model)), *error.args[1:])
            raise


def _tolerance(way: Way, is_manual: bool) -> Closeness | None:
    """Returns the tolerances that the user gave; None: the usual ones. Errors: InputError for
    options that do not go together."""
    if way.seed < 0:
        raise InputError(f"--seed {way.seed}: must be at least 0")
    check_timeout(way.timeout)
    for option, given in (("--steps", way.steps), ("--lr", way.lr)):
        if given is not None and not way.train:
            raise InputError(
                f"{option} {given}: applies to --train only; add that, or leave it out"
            )
    if way.each and (way.train or is_manual):
        raise InputError(
            "--each compares one run with the unsplit model, but --train and a manual program "
            "need another comparison; leave --each out"
        )
    if way.rtol is None and way.atol is None:
        return None
    if way.train:
        raise InputError(
            "--rtol and --atol do not apply to --train, whose tolerances are fixed; leave them out"
        )
    return Closeness(way.rtol or 0.0, way.atol or 0.0)


def _check_training(model: Path, options: Options, way: Way) -> Check:
    """Checks a training step over several steps; each starts from the states of the step before."""
    steps = STEPS if way.steps is None else way.steps
    lr = RATE if way.lr is None else way.lr
    if steps < 1:
        raise InputError(f"--steps {steps}: must be at least 1")
    check_rate(lr)
    proto = read_proto(model)
    check_step(Step.of(header_of(proto)), {port.name for port in proto.graph.input}, model)
    is_manual = options.preset == MANUAL
    with _own_place(model) as par:
        plan = sharder.shard(model, par, replace(options, replicas=is_manual))
        with Trainer(par, timeout=way.timeout, log_dir=way.log_dir) as trainer:
            batches = islice(_batches(way, plan, trainer), steps)
            slopes: list[Comparison] = []
            left_out = ""
            if is_manual:
                report = compare_trained_replicas(trainer, batches, lr)
            else:
                first = next(batches)
                spec = trainer.spec.unsplit
                slopes, left_out = compare_gradients(model, spec, first, seed=way.seed)
                report = compare_training(model, trainer, chain([first], batches), lr)
    against = "compared with each other" if is_manual else "compared with one rank"
    title = f"{_trained(plan)}\n{steps} steps over {plan.mesh.size} ranks {against}:"
    report = replace(report, rows=(*report.rows, *slopes))
    return Check(plan, report, title, elsewhere=left_out)


def _trained(plan: Plan) -> str:
    """Returns `N parameters of M elements are trained`."""
    names = {slot.input for slot in (plan.step.parameters if plan.step else ())}
    shapes = [port.shape or () for port in plan.inputs if port.name in names]
    count = sum(math.prod(size or 0 for size in shape) for shape in shapes)
    return f"{len(names)} parameters of {count:,} elements are trained"


def _batches(way: Way, plan: Plan, trainer: Trainer) -> Iterator[dict[str, Any]]:
    """Yields batches without end: of the user's data in order (offsets of bags need that), epoch
    after epoch; or random ones."""
    data = None if way.inputs is None else trainer.batches_of(way.inputs)
    specs = [s for s in trainer.bundle.input_specs if s[0] in trainer.spec.data]
    ranges = {name: r for name, r in plan.ranges.items() if name in trainer.spec.data}
    for number in count():
        if data is not None:
            yield from data.epoch(number, None)
        else:
            yield make_feeds(specs, ranges, way.seed + number)


def _sizes_to_try(plan: Plan, bundle: Bundle) -> Iterator[dict[str, int]]:
    """Yields sizes of symbols in the order in which to try them: the typical ones, then sizes by
    _RESIZES. Unless the user gave the typical sizes, a variant of these comes first, in which split
    sizes below the number of ranks are larger, so that every rank has elements, in uneven shards.
    """
    uneven = 2 * plan.mesh.size - 1
    for typical, _ in plan.typical[:1]:
        sizes = dict(typical)
        if not plan.is_told:
            yield {
                s: max(n, uneven) if n < plan.mesh.size and _splits(bundle, s, sizes) else n
                for s, n in sizes.items()
            }
        yield sizes
    for resize in _RESIZES:
        yield {s: resize(n) for s, n in plan.example.items()}


def _feeds(
    model: Path,
    options: Options,
    way: Way,
    plan: Plan,
    bundle: Bundle,
    chosen: Mapping[str, int],
) -> tuple[dict[str, Any], list[str], bool]:
    """Completes the user's feeds by random ones. Returns all feeds; a text with name, type and
    shape of each random feed; and True if the user's feeds leave an open size undetermined. The
    size in `chosen` is then used, unless it contradicts other sizes. Errors: InputError if the
    random feeds would have too many elements."""
    specs = bundle.input_specs
    feeds: dict[str, Any] = {}
    if isinstance(way.inputs, Mapping):
        feeds = dict(way.inputs)
    elif way.inputs is not None:
        feeds = read_given(way.inputs, specs)
    states = plan.step.unsplit.slots if plan.step else ()
    unfed = [s.input for s in states if s.input not in feeds]
    if zeros := [name for name in unfed if bundle.initial.get(name) == ZERO]:
        raise InputError(
            f"{model} is a training step, whose states start with zeros ({zeros[0]!r}); give "
            "--train, which compares several steps from there"
        )
    for name, value in feeds.items():
        if name in bundle.inputs:
            check_array(bundle.inputs[name], value)
    shapes = {
        name: value.shape
        for name, value in feeds.items()
        if isinstance(value, np.ndarray) and name in bundle.inputs
    }
    known = dict(zip(bundle.symbols, bundle.sizes(shapes), strict=True))
    fed = {v for n in shapes for v in bundle.inputs[n].symbols}
    free = [s for s in bundle.symbols if s not in fed]
    sizes = {s: known[s] if s in fed else chosen[s] for s in bundle.symbols}
    sizes, ranges = _consistent(model, options, plan, bundle, sizes, fed)
    rest: Any = [
        (name, kind, bundle.inputs[name].shape_at(sizes))
        for name, kind, _ in specs
        if name not in feeds
    ]
    unknown = {name for name, _, _ in rest}
    ranges = {name: r for name, r in ranges.items() if name in unknown}
    made_up = [f"{name} {kind} {list(shape)}" for name, kind, shape in rest]
    is_large = max(sizes.values(), default=0) > max(plan.example.values(), default=0)
    if is_large and not (plan.is_told and chosen == plan.typical[0][0]):
        elements = sum(math.prod(size or 0 for size in shape) for _, _, shape in rest)
        if elements > _MOST_ELEMENTS:
            wanted = ",".join(f"{name}={sizes[name]}" for name in free)
            raise InputError(
                f"random inputs at {wanted} would have {elements:,} elements, too many to try "
                f"unasked; give --inputs FILE.npz, or --typical {wanted} if runs have these sizes"
            )
    return make_feeds(rest, ranges, way.seed) | feeds, made_up, bool(free)


def _consistent(
    model: Path,
    options: Options,
    plan: Plan,
    bundle: Bundle,
    sizes: Mapping[str, int],
    fed: Collection[str],
) -> tuple[dict[str, int], Mapping[str, Range]]:
    """Returns sizes that the model accepts, by symbol, and the range of each integer input at these
    sizes. Starts from `sizes` and changes sizes that contradict each other: the length of a mask
    must be the sum of past and present lengths. Symbols in `fed` keep their sizes."""
    if not bundle.symbols or options.preset == MANUAL:
        return dict(sizes), plan.ranges
    split = {s for s in bundle.symbols if _splits(bundle, s, sizes)}
    changed = settled(plan.caches, sizes, split.union(fed))
    shapes = {n: port.shape_at(changed) for n, port in bundle.inputs.items()}
    fixed = {n: [s or 0 for s in shape] for n, shape in shapes.items() if None not in shape}
    bound = replace(options, dims=None, typical=Typical())
    graph = load_model(model, bound, shapes=fixed).graph
    return changed, integer_ranges(graph)


def _splits(bundle: Bundle, symbol: str, sizes: Mapping[str, int]) -> bool:
    """True if an input or output is split along a dimension whose size depends on this symbol."""
    ports = (*bundle.inputs.values(), *bundle.outputs.values())
    layouts = [(p.shape, p.layout_at(sizes)) for p in ports if symbol in p.symbols]
    return any(
        isinstance(size, Polynomial) and symbol in size.variables and bool(dim_axes(dim))
        for shape, layout in layouts
        for size, dim in zip(shape or (), layout.dims if layout is not None else (), strict=False)
    )
