"""A plan with its history: what each of its passes changed, and the graphs of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnxpar.compiler.pass_ import PassContext
from onnxpar.load.load import Model
from onnxpar.planner import sharder
from onnxpar.planner.observer import Observers
from onnxpar.planner.options import Options
from onnxpar.report.explain import Explained, Explainer, refuse_manual
from onnxpar.report.pass_steps import PassStep, PassSteps
from onnxpar.report.rank_graph import RankGraph, rank_graph


@dataclass(frozen=True)
class Walk:
    """The history of a plan, for its page.

    steps   what its passes changed, in order
    ranks   the graphs of its ranks
    makers  by tensor, the node that computes it in the graph before the passes
    """

    steps: tuple[PassStep, ...]
    ranks: RankGraph
    model: Model
    makers: Mapping[str, str]

    @staticmethod
    def of(passes: PassSteps, ctx: PassContext) -> Walk:
        """Returns the history from what an observer collected, and the context after all passes."""
        return Walk(tuple(passes.steps), rank_graph(ctx), ctx.model, dict(passes.makers))


def walk(path: str | Path, options: Options) -> tuple[Explained, Walk]:
    """Plans a model like the command `plan`; returns the plan with its predicted steps, and the
    history of its passes. Errors: OnnxparError; StrategyError for a manual program."""
    refuse_manual(options)
    explainer, passes = Explainer(), PassSteps()
    plan, ctx = sharder.plan(path, options, Observers([explainer, passes]))
    return explainer.explained(plan), Walk.of(passes, ctx)
