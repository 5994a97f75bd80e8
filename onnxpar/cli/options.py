"""Options that several commands share, in groups."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from onnxpar.cli.rank_options import add_library
from onnxpar.errors import OnnxparError
from onnxpar.layout.mesh import MOST_RANKS, Mesh
from onnxpar.lowering.compression import THRESHOLD
from onnxpar.passes.fuse_all_reduces import FUSIONS
from onnxpar.passes.overlap_collectives import OVERLAPS
from onnxpar.presets.presets import PRESETS
from onnxpar.search.objective import LATENCY, OBJECTIVES
from onnxpar.search.search import SEARCHES

Options = argparse._ActionsContainer
"""A parser, or a group of its arguments."""


class GivenModel(argparse.Action):
    """Stores the path that the user gives as `given_model`, whose ONNX file takes the place of
    `model` once messages are shown."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values is not None:
            namespace.given_model = namespace.model = Path(values)


def add_model(to: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Adds the model, and the options that decide its layouts."""
    what = "an ONNX model, or a folder of a language model (of GenAI, Optimum or transformers.js), "
    what += "also of an encoder-decoder; with onnxpar[hf] also a folder of Transformers, or a name "
    what += "on the hub of Hugging Face, which is exported first"
    what += "; or a file that --dump wrote" if nargs else ""
    to.add_argument("model", metavar="model.onnx", action=GivenModel, nargs=nargs, help=what)
    _add_ranks(to.add_argument_group("ranks"))
    strategy = to.add_argument_group("strategy")
    _add_choice_of_strategy(strategy)
    _add_search(strategy)
    _add_strategy_files(strategy)
    add_plugin(strategy)
    add_library(strategy)
    _add_sizes(to.add_argument_group("sizes"))
    _add_states(to.add_argument_group("states and caches"))


def _add_ranks(to: Options) -> None:
    to.add_argument("--devices", type=int, metavar="N", help="number of ranks")
    to.add_argument(
        "--mesh", type=mesh, metavar="dp=2,tp=4", help="names and sizes of the mesh axes"
    )
    to.add_argument(
        "--topology",
        metavar="FILE",
        help="YAML file with the levels of links between ranks and the speed and memory of a "
        "rank, such as calibrate writes; a rank table of MindSpore or HCCL; or machines by name: "
        "64-core, or 8x64-core,25GbE for eight hosts. Default: this host, which is measured once, "
        "in some seconds, and the result kept",
    )
    to.add_argument(
        "--for-any-host",
        action="store_true",
        help="without --topology, make the same plan on every machine, from constants, and promise "
        "no times; this host is not measured",
    )
    to.add_argument(
        "--balance",
        action="store_true",
        help="give ranks whose devices differ in --topology parts in proportion to their speed, "
        "as far as their memory allows. Default: equal parts",
    )


def _add_choice_of_strategy(to: Options) -> None:
    to.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help=f"a fixed strategy instead of the search: {', '.join(PRESETS)}. hybrid is for a mesh "
        "of dp and another axis, context-parallel for one with cp, the zero presets are for "
        "training steps. manual: "
        "the model is the program of one rank and already contains onnxpar's collectives, like the "
        "body of JAX's shard_map; the tensors of --strategy say how to shard inputs and weights "
        "and how to put outputs together, and all others stay whole",
    )
    to.add_argument(
        "--search",
        choices=SEARCHES,
        help="auto, the default without --preset, --strategy and annotations: find the fastest "
        "strategy by the cost model of --topology, and the mesh if none is given; requests of a "
        "strategy file are met. The other choices are for comparison: a preset; exhaustive, which "
        "tries all strategies of a small model; propagation, which shards only what a strategy or "
        "annotations request, and what follows from that",
    )


def _add_search(to: Options) -> None:
    to.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="most bytes that a rank may hold at any time, such as 16GB: weights, states and the "
        "results of nodes. The search uses only strategies within the limit; the command fails if "
        "there is none, or if the given strategy needs more",
    )
    to.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=LATENCY,
        help="what the search minimizes. latency: the time of a run; throughput: the time from one "
        "run to the next where several runs overlap, so that communication and compute overlap. "
        "Default: %(default)s",
    )
    to.add_argument(
        "--untied",
        action="store_true",
        help="let the search choose a strategy for each of several equal blocks, instead of one "
        "for all of them. This takes longer; it helps if a memory limit forces only some of the "
        "blocks into a slower strategy",
    )


def _add_strategy_files(to: Options) -> None:
    to.add_argument(
        "--strategy",
        metavar="FILE",
        help="YAML file with the keys mesh, shard (how to split nodes) and tensors (how to split "
        "tensors); a preset or --search, if given, decides the rest",
    )
    to.add_argument(
        "--dataset-strategy",
        metavar="LAYOUT",
        help="layout of all data inputs, as in MindSpore: data_parallel (the first dimension over "
        "all ranks), full_batch (every rank holds them whole), or the number of shards of each "
        "dimension of each input: '[[8, 1], [8]]'",
    )
    to.add_argument(
        "--configuration",
        metavar="NAME",
        help="which multi-device annotations of the model to follow, or 'none'; default: those for "
        "N devices. A strategy adds to them and must not contradict them; a preset or "
        "--search, if given, decides the rest. Pipeline stages in them are ignored",
    )
    to.add_argument("--strict", action="store_true", help="fail if an op has no sharding rule")


def _add_sizes(to: Options) -> None:
    add_dims(to)
    to.add_argument(
        "--typical",
        action="append",
        default=[],
        metavar="NAME=N,..",
        help="usual values of open sizes, such as batch=1,seq=128. The search and "
        "all costs assume these values; the sharded model runs with any. For a mix, give the "
        "option several times, each with a weight: batch=1,seq=1:0.9. Default: a batch of 1, and "
        "lengths of 128 or what the model allows",
    )


def add_time_passes(to: Options) -> None:
    """Wall times."""
    to.add_argument(
        "--time-passes",
        action="store_true",
        help="print a table of wall times to standard error, also if the command fails: of each "
        "pass, and of reading the model, the search, checks and writing",
    )


def add_dims(to: Options) -> None:
    """Adds the option for sizes of symbolic dimensions."""
    to.add_argument(
        "--dim",
        dest="dims",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="size of a symbolic dimension: a number, or an expression of other symbols, which "
        "ties them: s74=s2, total=past+seq",
    )


def _add_states(to: Options) -> None:
    to.add_argument(
        "--state",
        dest="states",
        action="append",
        default=[],
        metavar="IN=OUT",
        help="a state pair: an output that the next run gets as an input; in addition to the "
        "pairs that are found by ops and by names",
    )
    to.add_argument(
        "--only-given-states",
        dest="find_states",
        action="store_false",
        help="use only the state pairs given by --state; look for no others",
    )
    to.add_argument(
        "--page-size",
        type=int,
        metavar="N",
        help="put the caches of a language model's decoder in pages of N tokens, so that texts of "
        "any lengths run together, and join and leave between runs, as in `serve`. Default for a "
        "folder of a language model whose caches can be in pages: 16; else 0, which leaves caches "
        "as the model has them. check and annotate always use the model without pages",
    )
    to.add_argument(
        "--kv-dtype",
        choices=("float32", "float16", "int8"),
        help="the type of caches in pages. float16 takes half the memory of float32, int8 little "
        "more than a quarter, with a scale for each key and value; default: as in the model",
    )


def add_plugin(to: Options) -> None:
    """Adds the option for the user's own passes and rules."""
    to.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="import passes and sharding rules of your own: a module, or a file x.py; installed "
        "packages add theirs by entry points (see docs/how-to/pass.md)",
    )


def add_lowering(to: argparse.ArgumentParser) -> None:
    """Adds options of collectives, and the option for additional passes."""
    _add_collectives(to.add_argument_group("collectives, tables and passes"))


def _add_collectives(to: Options) -> None:
    to.add_argument(
        "--fusion",
        metavar="{" + ",".join((*FUSIONS, "index:N,..")) + "}",
        help="how to join collectives that do not wait for each other. size: up to --bucket-mb; "
        "cost (default for training steps): in buckets whose last one ends first by the cost "
        "model, if --overlap lets ranks communicate while they compute, otherwise as size; "
        "index:20,35: the gradients' reductions before the 20th, then those before the 35th, then "
        "the rest, in the order in which they run; or none",
    )
    to.add_argument(
        "--overlap",
        choices=OVERLAPS,
        help="whether a thread of each rank communicates while the rank computes. auto (default): "
        "collectives between hosts that gain by it, by the cost model of --topology; on: all that "
        "have something in between; off: none",
    )
    to.add_argument(
        "--bucket-mb",
        type=float,
        metavar="X",
        help="largest fused collective, in MiB; default: 64 for all-reduces, 8 for reduce-scatters "
        "and all-gathers",
    )
    to.add_argument(
        "--compression",
        metavar="KIND",
        help="format in which ranks send gradients of a training step: float16 or bfloat16, added "
        "up in float32; 2bit:T, where a rank sends T, 0 or -T for each element and keeps the rest "
        f"for later steps (T should be near the largest elements; default {THRESHOLD}); or none",
    )
    to.add_argument(
        "--place",
        action="append",
        default=[],
        metavar="TABLE=host",
        help="keep a table, by glob, and its optimizer state in files instead of memory; ranks "
        "have in memory the rows that they use. Nodes must look up its rows, and a training step "
        "must update them lazily (`onnxpar grad --lazy`)",
    )
    to.add_argument(
        "--add-pass",
        dest="passes",
        action="append",
        default=[],
        metavar="PASS",
        help="also run a pass of a plugin: 'NAME{option=value}' for one that rewrites the model, "
        "'NAME before PASS' or 'NAME after PASS' for any place; `opt --passes list` shows all",
    )


def add_save(to: Options) -> None:
    """Adds options for further files to write: dumps and the strategy."""
    add_dump(to)
    to.add_argument(
        "--save-strategy",
        metavar="FILE",
        help="write the chosen strategy (of the search, a preset, ...) as a file to read and "
        "edit: a few entries, from which the rest follows; with no other option, `--strategy "
        "FILE` gives the same plan",
    )


def add_dump(to: Options) -> None:
    """Adds the option to dump the graph after every pass."""
    to.add_argument(
        "--dump",
        metavar="DIR",
        help="write the graph after every pass, even after one that fails: as text, "
        "01-NAME.onnxtxt, and up to localize-ops as a model, 01-NAME.onnx, which opt reads back; "
        "the folder 00-load has one file for each rewrite of the loader that changes "
        "the model",
    )


def rank_numbers(text: str) -> list[int]:
    """Parses numbers of ranks, such as 0,1 or 4-7. Errors: argparse.ArgumentTypeError."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() and len(end) < 10 for end in ends):
            raise argparse.ArgumentTypeError(f"{text!r}: give numbers of ranks, such as 0,1 or 4-7")
        start, end = map(int, ends)
        if end < start:
            raise argparse.ArgumentTypeError(f"{part!r}: give the lower rank first, such as 4-7")
        if end >= MOST_RANKS:
            raise argparse.ArgumentTypeError(f"{part!r}: ranks are below {MOST_RANKS}")
        found += range(start, end + 1)
    return found


def named_number(text: str) -> tuple[str, int]:
    """Parses NAME=NUMBER. Errors: argparse.ArgumentTypeError."""
    name, _, number = text.rpartition("=")
    try:
        return name, int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=NUMBER") from None


def named_value(text: str) -> tuple[str, float]:
    """Parses NAME=VALUE, where the value may be a fraction. Errors:
    argparse.ArgumentTypeError."""
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE, a number") from None


def named_number_or_none(text: str) -> tuple[str, int | None]:
    """Parses NAME=NUMBER or NAME=none. Errors: argparse.ArgumentTypeError."""
    if text.endswith("=none"):
        return text.removesuffix("=none"), None
    return named_number(text)


def mesh(text: str) -> Mesh:
    """Parses a mesh argument. Errors: argparse.ArgumentTypeError."""
    try:
        return Mesh.parse(text)
    except OnnxparError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
