"""The Python calls: one for each command, with the command's options by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import onnxpar.report.candidate_lines
import onnxpar.report.comparison_lines  # noqa: F401  (these register the texts of results)
from onnxpar.base.errors import InputError, StrategyError, UnprovedError
from onnxpar.base.pass_times import PassTimes
from onnxpar.compiler.plan import Plan, SavedPlan
from onnxpar.equivalence.verification import Verification
from onnxpar.equivalence.verify import verify_bundle
from onnxpar.graph.given_model import Source, model_file
from onnxpar.graph.model_name import model_name
from onnxpar.graph.typical import sizes_text
from onnxpar.planner import sharder
from onnxpar.planner.convert_options import options_of
from onnxpar.planner.dump import Dump
from onnxpar.planner.loader import Loader
from onnxpar.planner.named_passes import run_named
from onnxpar.planner.observer import Observer, Observers
from onnxpar.planner.option_entry import lists
from onnxpar.planner.option_table import LayoutOptions, PlanOptions
from onnxpar.planner.options import Options
from onnxpar.planner.paging import paged_by_default
from onnxpar.planner.plugins import load_plugin
from onnxpar.planner.refuse_overwriting import refuse_overwriting
from onnxpar.planner.save_strategy import Saver
from onnxpar.report import compare_trace as comparing
from onnxpar.report import op_table
from onnxpar.report.check import Check, Inputs, Way, check_model
from onnxpar.report.compare_strategies import (
    Candidates,
    choices,
    fastest_first,
    on_one_rank,
    try_each,
)
from onnxpar.report.compare_trace import PlannedNodes
from onnxpar.report.comparison_result import Comparison
from onnxpar.report.explain import Explainer, explain
from onnxpar.report.node_data import write_node_data
from onnxpar.report.pass_steps import PassSteps
from onnxpar.report.report_page import explained_of, write_page
from onnxpar.report.strategy_costs import StrategyCosts, strategy_costs
from onnxpar.report.walk import Walk
from onnxpar.runtime.profile.trace import read_trace
from onnxpar.runtime.session.bundle import Bundle, with_encoder
from onnxpar.strategy.manual import MANUAL

if TYPE_CHECKING:
    from typing_extensions import Unpack


File = str | os.PathLike[str]


@lists(PlanOptions)
def shard(
    model: Source,
    output: File | None = None,
    *,
    save_strategy: File | None = None,
    dump: File | None = None,
    progress: Callable[[int], None] | None = None,
    time_passes: PassTimes | None = None,
    ranks: Collection[int] | None = None,
    shorter: Sequence[File] = (),
    verify: bool = False,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Writes a sharded model as a folder that `InferenceSession` runs, and returns its plan.

    model          a file, an onnx.ModelProto, or its bytes
    output         the folder; default: the model's name with .par, in the current folder
    ranks          the ranks whose files are written, such as those of this host: all hosts make the
                   same plan, without measuring themselves. If the folder has that plan already, the
                   files go beside those of its other ranks. Default: all ranks
    shorter        of a training step: files of the same step for shorter samples, so that `train`
                   makes batches of samples that are about as long
    verify         prove that the ranks compute the model, as `verify` does, before the folder gets
                   its name; UnprovedError if they are not shown to
    save_strategy  file to write the chosen strategy to
    dump           folder to write the graph to after every pass
    progress       called with the number of bytes of each weight that is written
    time_passes    collects the wall time of each pass
    options        see `PlanOptions` and `LayoutOptions`

    Errors: OnnxparError, which names the cause and the remedy; nothing is left half-written.
    """
    asked = _plan_options(model, options, "shard", time_passes)
    written = {"save_strategy": save_strategy, "dump": dump}
    refuse_overwriting({**options, **written, "model": model, "shorter": shorter})
    target = output_of(model) if output is None else Path(output)
    saver, explainer = saver_of(save_strategy, asked), Explainer()
    with model_file(model) as path:
        observer = observers([saver, explainer], dump)
        files = [Path(file) for file in shorter]
        prove = Prover(path, target, files) if verify else None
        made = sharder.shard(path, target, asked, progress, observer, ranks, files, prove)
    saver.write()
    return _with_steps(made, explainer, asked)


@lists(PlanOptions)
def make_plan(
    model: Source,
    *,
    save_strategy: File | None = None,
    dump: File | None = None,
    html: File | None = None,
    node_data: File | None = None,
    time_passes: PassTimes | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Returns the plan that `shard` follows with the same options; no model is written.

    Printing the plan shows the text of `onnxpar plan`; a notebook shows the plan's page, which is
    also written to the file `html` if it is given. `node_data` is a folder to write files for
    Model Explorer to, each with a value of each node. Errors: OnnxparError.
    """
    asked = _plan_options(model, options, "plan", time_passes)
    refuse_overwriting(
        {**options, "model": model, "save_strategy": save_strategy, "dump": dump, "html": html}
    )
    saver, explainer = saver_of(save_strategy, asked), Explainer()
    steps = PassSteps() if html is not None or node_data is not None else None
    with model_file(model) as path:
        each = [saver, explainer, *([] if steps is None else [steps])]
        made, ctx = sharder.plan(path, asked, observers(each, dump))
        saver.write()
        made = _with_steps(made, explainer, asked)
        walked = None if steps is None else Walk.of(steps, ctx)
        if html is not None:
            write_page(html, explained_of(made), None, walked)
        if node_data is not None and walked is not None:
            write_node_data(node_data, explained_of(made), walked)
    return made


@lists(LayoutOptions)
def annotate(model: Source, output: File, **options: Unpack[LayoutOptions]) -> Plan:
    """Writes the model with its plan as ONNX's multi-device annotations, which `shard` can read.
    Errors: OnnxparError."""
    asked = options_of(options, "annotate", LayoutOptions)
    refuse_overwriting({**options, "model": model, "output": output})
    with model_file(model) as path:
        return sharder.annotate(path, Path(output), asked)


@lists(PlanOptions)
def check(
    model: Source,
    inputs: Inputs = None,
    *,
    seed: int = 0,
    each: bool = False,
    train: bool = False,
    steps: int | None = None,
    lr: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    timeout: float = 60.0,
    log_dir: File | None = None,
    **options: Unpack[PlanOptions],
) -> Check:
    """Shards a model, runs it on its ranks, and compares every output with that of the unsplit
    model under onnxruntime.

    inputs   an .npz file, or arrays by input name; missing inputs are random, by `seed`
    each     compare every tensor that both models have, and name the first one that differs
    train    for a training step: take `steps` steps (default 50) at the learning rate `lr`
             (default 0.01), and compare the losses and the parameters
    rtol     allow each element to differ by `atol + rtol * abs(reference)`, like numpy.allclose;
             without both, the tolerance depends on the dtype and is relative to the largest element
    atol     see `rtol`
    timeout  longest wait for a rank, in seconds
    log_dir  folder for the output of each rank, under rank.N/

    Returns the outcome: `ok`, `text()`, the `plan`, and the differences in `report.rows`. Errors:
    OnnxparError if the model cannot be sharded or run; a mismatch is not an error.
    """
    asked = options_of(options, "check")
    way = Way(inputs, seed, each, train, steps, lr, rtol, atol, timeout, log_dir)
    with model_file(model) as path:
        return check_model(path, asked, way)


def verify(
    model: Source,
    par: File,
    *,
    dims: Mapping[str, int] | None = None,
    least: Literal["exact", "lemma", "sampled", "assumed"] = "assumed",
    weights: Literal["all", "sample", "none"] = "all",
    seed: int = 0,
    keep: File | None = None,
    shorter: Sequence[File] = (),
) -> Verification:
    """Proves from the files alone that the ranks of a sharded model compute the unsplit model, or
    says where the proof ends; runs neither.

    model  the model, or the training step, that was sharded
    par    the folder that `shard` wrote; or one with rank files of others and a ports.json
    dims   values of open sizes; the others are those of the plan's example
    least  the weakest proof of a node that is accepted: exact (arithmetic on positions), lemma (the
           rule of an op), sampled (both sides computed on drawn values), or assumed (believed
           without proof, for a reason that the result names)
    weights  how much of the weights in files is compared: all, a sample of their rows, or none:
             then they need not exist, and ranks are believed to hold what plan.json says
    seed   of drawn values
    keep   a new folder to write the part of the model, and of its ranks, to where the proof ends:
           two models that onnxruntime runs, and values of their inputs
    shorter  of a training step, the steps for shorter samples that were sharded with it; programs
             of the ranks for which no step is given are assumed

    Returns the outcome: `ok`, `text()`, how many nodes were proved in which way, and `failures`.
    Errors: OnnxparError if a file cannot be read; a proof that fails is not an error.
    """
    with model_file(model) as path:
        place = None if keep is None else Path(keep)
        return verify_bundle(
            path, Path(par), dims=dims, least=least, weights=weights, seed=seed, keep=place,
            shorter=[*map(Path, shorter)],
        )  # fmt: skip


class Prover:
    """Proves a folder that is to be called `par` before it has this name; `result` has the
    proof."""

    def __init__(self, model: Path, par: Path, shorter: Sequence[Path] = ()) -> None:
        self.model, self.par, self.shorter = model, par, shorter
        self.result: Verification | None = None

    def __call__(self, folder: Path) -> None:
        """Errors: UnprovedError."""
        found = verify_bundle(self.model, folder, shorter=self.shorter)
        self.result = replace(found, folder=str(self.par))
        if not self.result.ok:
            raise UnprovedError(f"{self.par} is not written.\n{self.result}")


@lists(PlanOptions)
def candidates(
    model: Source, *, html: File | None = None, **options: Unpack[PlanOptions]
) -> Candidates:
    """Plans the model with every strategy that applies, and returns the plans by predicted time,
    fastest first. `html` is a file to write a plan's page to: of the preset or search in `options`,
    or else of the fastest plan.

    Errors: OnnxparError, also if no strategy applies.
    """
    asked = _plan_options(model, options, "candidates")
    refuse_overwriting({**options, "model": model, "html": html})
    with model_file(model) as path:
        return compare_strategies(path, asked, html)


@lists(PlanOptions)
def compare_trace(model: Source, trace: File, **options: Unpack[PlanOptions]) -> Comparison:
    """Returns two times for each op and collective: as the cost model predicts it, and as a trace
    measured it.

    `trace` is a file that `InferenceSession.end_profile` or `onnxpar run --profile` wrote;
    `options` must be the options of the `shard` call. Errors: OnnxparError.
    """
    asked = _plan_options(model, options, "compare_trace")
    with model_file(model) as path:
        return compare_with_trace(path, asked, trace)


@lists(PlanOptions)
def node_costs(model: Source, node: str, **options: Unpack[PlanOptions]) -> StrategyCosts:
    """Lists every strategy of the nodes that `node` names over the mesh of the plan, with the
    compute, communication and memory of a rank by the cost model.

    `node` is a name or glob of nodes, or of weights and inputs that nodes read, as a key of `shard`
    in a strategy file. `nodes[i].strategies` of the result are in order of time, and one of them is
    `chosen` by the plan; `to_json()` has the numbers in seconds and bytes. Errors: OnnxparError.
    """
    asked = _plan_options(model, options, "node_costs")
    with model_file(model) as path:
        return strategy_costs(path, node, asked)


@lists(LayoutOptions)
def opt(
    model: Source,
    passes: str,
    *,
    print_after: Sequence[str] = (),
    dump: File | None = None,
    output: File | None = None,
    time_passes: PassTimes | None = None,
    **options: Unpack[LayoutOptions],
) -> str:
    """Runs passes, such as `"propagate-layouts,insert-collectives"`, on a model or a dump, and
    returns the graph as text.

    print_after  passes after which to add the graph to the text, or "all"; default: the last pass
    dump         folder to write the graph to after every pass
    output       file to write the graph to after the last pass, as a model
    time_passes  collects the wall time of each pass

    Errors: OnnxparError.
    """
    asked = timed(options_of(options, "opt", LayoutOptions), time_passes)
    refuse_overwriting({**options, "model": model, "output": output, "dump": dump})
    texts: list[str] = []
    with model_file(model) as path:
        run_named(path, asked, passes, print_after, dump, output, texts.append)
    return "".join(texts)


def inspect(par: File, *, verify: bool = False) -> SavedPlan:
    """Returns the plan of a sharded model. With `verify`, first checks every file of the folder
    against its digest; ranks of which it has no file are left out. Errors: ModelError if `par` is
    not a sharded model, or has changed."""
    bundle = Bundle.load(par)
    if verify:
        for each in with_encoder(bundle):
            each.files.check_whole()
    return SavedPlan(bundle.data)


def ops(pattern: str = "*", *, plugin: Sequence[str] = ()) -> list[op_table.OpRow]:
    """Returns the sharding rule of each op whose name matches a glob, and how the rule was
    verified; `plugin` names Python modules to import, with rules of your own. Errors: StrategyError
    if no op matches."""
    for module in plugin:
        load_plugin(module)
    table = op_table.rows(pattern)
    if not table:
        raise StrategyError(f"{pattern!r} matches no op; `onnxpar ops` lists them")
    return table


def output_of(model: Source) -> Path:
    """Returns the default folder for a sharded model: the model's name with .par, in the current
    folder. Errors: InputError for a model in memory, which has no name."""
    if not isinstance(model, (str, os.PathLike)):
        raise InputError("a model in memory has no name; give the folder to write to as output")
    path = Path(model)
    name = path.stem if path.is_file() else path.name  # of a folder, `Llama-3.2-1B`
    return Path(f"{name or 'model'}.par")


def _plan_options(
    model: Source, asked: PlanOptions, caller: str, times: PassTimes | None = None
) -> Options:
    """Converts the options of the user to those of the pipeline. For the folder of a language
    model, they are those of its decoder, with a default page size. `caller` names the function in
    errors; `times` collects the wall times of the pipeline. Errors: OnnxparError."""
    return paged_by_default(model, timed(options_of(asked, caller), times))


def timed(options: Options, times: PassTimes | None) -> Options:
    """Options under which the pipeline adds its wall times to `times`, if given."""
    return options if times is None else replace(options, times=times)


def saver_of(path: File | None, options: Options) -> Saver:
    """Returns a Saver that writes the chosen strategy to `path`; without a path, it does nothing.
    Errors: StrategyError for a manual program."""
    if path is not None and options.preset == MANUAL:
        raise StrategyError(
            "--save-strategy: a manual program has no strategy to save; leave it out"
        )
    return Saver(path)


def compare_strategies(
    path: Path,
    options: Options,
    html: File | None,
) -> Candidates:
    """Plans every strategy, and writes the page of one if `html` is given."""
    options = replace(options, check_layouts=False)
    given = options if html is None else replace(options, preset=None, search=None)
    loader = Loader(path)
    alone = on_one_rank(path, given, loader)
    tried = try_each(path, choices(path, given), loader)
    found = fastest_first(model_name(path), options.objective.goal, tried, alone)
    if html is not None:
        is_open = options.preset is None and options.search is None
        won = found.winner.explained if is_open else None
        write_page(html, won or explain(path, options), found)
    return found


def compare_with_trace(path: Path, options: Options, trace: File) -> Comparison:
    """Compares the predictions of a plan with a trace of its runs."""
    recorded = read_trace(trace)
    if options.preset == MANUAL:
        raise StrategyError(
            "--compare: the time of a manual program cannot be predicted; use `run --profile`"
        )
    planned = PlannedNodes(recorded.sizes)
    made, _ = sharder.plan(path, options, planned)
    sizes = recorded.sizes or made.typical
    return replace(comparing.compare_trace(recorded, made, planned.nodes), sizes=sizes_text(sizes))


def observers(each: Sequence[Observer], dump: File | None) -> Observer:
    """Returns what sees a plan being made: these observers, and one that writes dumps, if there is
    a folder for them."""
    return Observers([*each, *([] if dump is None else [Dump(dump)])])


def _with_steps(plan: Plan, explainer: Explainer, options: Options) -> Plan:
    """Returns the plan after setting its `explained`: the steps of a rank with their predicted
    times. A manual program has no predictions."""
    if options.preset != MANUAL:
        plan.explained = explainer.explained(plan)
    return plan
