"""Compares strategies for a model (`plan --candidates`): predicted time, bytes that a rank sends,
memory of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.base.shown import Shown
from onnxpar.graph.interchange import header_of
from onnxpar.graph.training_spec import Step
from onnxpar.layout.mesh import Mesh
from onnxpar.load.read_file import read_proto
from onnxpar.planner.loader import Loader
from onnxpar.planner.options import NO_RANKS, Options
from onnxpar.report.explain import Explained, explain
from onnxpar.search.meshes import BATCH, WIDTH
from onnxpar.search.predict import Prediction
from onnxpar.search.search import AUTO, PROPAGATION
from onnxpar.strategy.class_parallel import CLASS
from onnxpar.strategy.context_parallel import AXIS, CONTEXT
from onnxpar.strategy.expert_parallel import EXPERT
from onnxpar.strategy.presets import preset_mesh
from onnxpar.strategy.table_parallel import TABLES
from onnxpar.strategy.training_presets import SEQUENCE, ZERO_STAGES

ONE_RANK = "one rank"
"""The name of the unsplit model on one rank, in tables."""
MOST_HYBRIDS = 6
"""At most this many meshes of two axes are tried, evenly spaced among all factorizations of the
number of ranks."""
_SAME = 1e-9
"""Predictions that differ by fewer seconds count as equal."""


@dataclass(frozen=True)
class Candidate:
    """A strategy that could be planned.

    predicted  predicted time of a run
    seconds    the predicted time as the objective counts it
    sent       bytes that a rank sends, by kind of collective
    memory     bytes of memory of a rank, by kind
    explained  the plan, step by step; None for all candidates but the fastest
    """

    strategy: str
    mesh: Mesh
    predicted: Prediction
    seconds: float
    sent: dict[str, int]
    memory: dict[str, int]
    explained: Explained | None = field(default=None, repr=False, compare=False)

    @property
    def label(self) -> str:
        """The strategy and its mesh as text: `tensor-parallel tp=4`."""
        return self.strategy if self.strategy == ONE_RANK else f"{self.strategy} {self.mesh}"

    @property
    def held(self) -> int:
        """Bytes of memory that a rank needs in all."""
        return sum(self.memory.values())

    def to_json(self) -> dict[str, Any]:
        """Returns an entry of `plan --candidates --json`, with times in seconds."""
        return {
            "strategy": self.strategy,
            "mesh": [list(axis) for axis in self.mesh.shape],
            "predicted": {"total": self.predicted.total, **asdict(self.predicted)},
            "seconds": self.seconds,
            "bytes": self.sent,
            "memory": self.memory,
        }


@dataclass(frozen=True)
class Refused:
    """A strategy that could not be planned for this model, and why."""

    strategy: str
    mesh: str
    reason: str


@dataclass(frozen=True)
class Candidates(Shown):
    """The strategies that were tried for a model: strategies that apply (`found`, best first by
    `objective`), strategies that do not (`refused`), and the unsplit model."""

    model: str
    ranks: int
    objective: str
    found: list[Candidate]
    refused: list[Refused]
    one_rank: Candidate

    @property
    def rows(self) -> list[Candidate]:
        """The strategies that apply and the unsplit model on one rank, fastest first."""
        return sorted([*self.found, self.one_rank], key=_order)

    @property
    def winner(self) -> Candidate:
        """The fastest strategy; of equally fast ones, the one with the least memory."""
        return self.found[0]

    @property
    def why(self) -> str:
        """A sentence that says by how much, and in what, the winner is faster than the next slower
        strategy."""
        best = self.winner
        slower = [c for c in self.found if c.seconds > best.seconds + _SAME]
        equal = [c.label for c in self.found[1 : len(self.found) - len(slower)]]
        alike = f" (and as fast: {', '.join(equal)})" if equal else ""
        if not slower:
            return f"{best.label} wins{alike}: none is slower{self._alone}"
        other = slower[0]
        ahead = _ms(other.seconds - best.seconds)
        parts = [
            f"{_ms(abs(gain))} {'less' if gain > 0 else 'more'} {what}"
            for gain, what in sorted(
                [
                    (other.predicted.compute - best.predicted.compute, "compute"),
                    (
                        other.predicted.communication - best.predicted.communication,
                        "communication",
                    ),
                ],
                reverse=True,
            )
            if abs(gain) > _SAME
        ]
        gains = ", ".join(parts)
        return f"{best.label} wins{alike}, {ahead} ahead of {other.label}: {gains}{self._alone}"

    @property
    def _alone(self) -> str:
        """The end of that sentence if several ranks are no faster than one; else empty."""
        if self.one_rank.seconds > self.winner.seconds + _SAME:
            return ""
        return f"; one rank alone takes no longer, {_ms(self.one_rank.seconds)}"

    def to_json(self) -> dict[str, Any]:
        """Returns the output of `plan --candidates --json`, with the winner first."""
        return {
            "model": self.model,
            "ranks": self.ranks,
            "objective": self.objective,
            "candidates": [c.to_json() for c in self.found],
            "one_rank": self.one_rank.to_json(),
            "refused": [asdict(r) for r in self.refused],
            "why": self.why,
        }


def choices(path: Path, options: Options) -> list[Options]:
    """Returns the options of each strategy to try: every preset and the search, each on the user's
    mesh, or if there is none, on meshes that suit it. Errors: StrategyError if the options already
    name a strategy, or no number of ranks."""
    if options.preset is not None or options.search is not None:
        raise StrategyError(
            "--candidates compares presets and the search; leave --preset and --search out"
        )
    options = replace(options, compared=True)
    is_step = Step.of(header_of(read_proto(path))) is not None
    names = ["data-parallel", "tensor-parallel", "hybrid"]
    mesh = options.mesh or (options.strategy.mesh if options.strategy is not None else None)
    context = [CONTEXT] if mesh is None or AXIS in mesh.sizes else []
    names += [*((*ZERO_STAGES, CLASS) if is_step else ()), SEQUENCE, *context, EXPERT, TABLES]
    if mesh is not None:
        each = [replace(options, preset=name, mesh=mesh) for name in names if name != "hybrid"]
        if BATCH in mesh.sizes and len(mesh.shape) > 1:
            each[1] = replace(each[1], preset="hybrid")
    elif options.devices is None:
        raise StrategyError(NO_RANKS)
    else:
        each = [
            replace(options, preset=name, mesh=mesh)
            for name in names
            for mesh in _meshes(name, options.devices)
        ]
    return [*each, replace(options, search=AUTO)]


def _meshes(preset: str, devices: int) -> Iterator[Mesh]:
    if preset != "hybrid":
        yield preset_mesh(preset, devices)
        return
    sizes = [n for n in range(2, devices) if devices % n == 0]
    count = min(len(sizes), MOST_HYBRIDS)
    for i in range(count):
        major = sizes[i * (len(sizes) - 1) // max(count - 1, 1)]
        yield Mesh(((BATCH, major), (WIDTH, devices // major)))


def try_each(path: Path, each: Sequence[Options], loader: Loader) -> Iterator[Candidate | Refused]:
    """Yields the outcome of each strategy in `each`, and shows the current one as progress."""
    for count, options in enumerate(each, 1):
        named = f"{options.preset or options.search} {options.mesh or ''}".strip()
        patience = options.objective.patience.telling(f"{count} of {len(each)}, {named}")
        objective = replace(options.objective, patience=patience)
        yield try_candidate(path, replace(options, objective=objective), loader)


def try_candidate(path: Path, options: Options, loader: Loader) -> Candidate | Refused:
    """Plans the model with one strategy; returns its times and memory, or why it does not apply."""
    strategy = options.preset or options.search or ""
    try:
        explained = explain(path, options, loader)
    except StrategyError as error:
        return Refused(strategy, str(options.mesh or ""), str(error))
    return _candidate(strategy, explained, options)


def on_one_rank(path: Path, options: Options, loader: Loader) -> Candidate:
    """Plans the unsplit model on one rank, without a memory limit; if devices differ, on the
    fastest."""
    topology = options.topology
    if topology is not None and topology.devices:
        each = [replace(topology, device=d, devices=()) for d in dict.fromkeys(topology.devices)]
        of_each = [replace(options, topology=one, balance=False) for one in each]
        plans = [on_one_rank(path, one, loader) for one in of_each]
        return min(plans, key=_order)
    alone = replace(
        options, compared=True, devices=1, mesh=None, preset=None, search=PROPAGATION, strategy=None
    )
    alone = replace(alone, objective=replace(options.objective, memory=None), configuration="none")
    return _candidate(ONE_RANK, explain(path, alone, loader), alone)


def _candidate(strategy: str, explained: Explained, options: Options) -> Candidate:
    plan = explained.plan
    sent: dict[str, int] = {}
    for entry in plan.collectives:
        sent[entry.kind] = sent.get(entry.kind, 0) + entry.bytes
    seconds = explained.predicted
    counted = options.objective.seconds(seconds.compute, seconds.communication, plan.hidden)
    return Candidate(strategy, plan.mesh, seconds, counted, sent, dict(plan.memory), explained)


def fastest_first(
    model: str, objective: str, tried: Iterable[Candidate | Refused], one_rank: Candidate
) -> Candidates:
    """Returns the comparison of the strategies in `tried`, sorted by their time as the objective
    counts it. Only the fastest keeps the steps of its plan. Errors: StrategyError if no strategy
    applies."""
    kept: list[Candidate] = []
    refused: list[Refused] = []
    for each in tried:
        if isinstance(each, Refused):
            refused.append(each)
            continue
        best = min([*kept, each], key=_order)
        kept = [c if c is best else replace(c, explained=None) for c in [*kept, each]]
    if not kept:
        raise StrategyError(f"no strategy applies; {refused[0].strategy}: {refused[0].reason}")
    kept.sort(key=_order)
    return Candidates(model, kept[0].mesh.size, objective, kept, refused, one_rank)


def _order(candidate: Candidate) -> tuple[int, int]:
    return round(candidate.seconds / _SAME), candidate.held


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
