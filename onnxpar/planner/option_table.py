"""The table of options of every function and command that makes plans.

The command line, the signatures of Python's functions, help() and the documentation, and the
refusal of options without effect use this table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from onnxpar.base.custom_ops import HELP as LIBRARY_HELP
from onnxpar.compiler.pass_ import Pass
from onnxpar.cost.topology import Topology
from onnxpar.graph.typical import Typical
from onnxpar.layout.mesh import Mesh
from onnxpar.lowering.compression import THRESHOLD
from onnxpar.passes.lower.fuse_all_reduces import FUSIONS
from onnxpar.planner.option_entry import (
    DECIDE,
    DUMP,
    EXTENSIONS,
    HARDWARE,
    LANGUAGE,
    MANUAL_PROGRAM,
    NEEDED,
    SIZES,
    SPLIT,
    TRAINING,
    Option,
    option_lines,
)
from onnxpar.planner.placed_passes import Placed
from onnxpar.strategy.presets import PRESETS, Preset
from onnxpar.strategy.strategy import Strategy

_BOTH = (MANUAL_PROGRAM, DUMP)


class LayoutOptions(TypedDict, total=False):
    """Options that decide the layouts of a model."""

    devices: Annotated[
        int | None, Option("number of ranks, if there is no --mesh", NEEDED, decided=(DUMP,))
    ]
    mesh: Annotated[
        str | Mesh | None,
        Option("names and sizes of the mesh axes", NEEDED, "dp=2,tp=4", decided=(DUMP,)),
    ]
    preset: Annotated[
        Preset | None,
        Option(
            f"a fixed strategy instead of the search: {', '.join(PRESETS)}. hybrid is for a mesh "
            "of dp and another axis, context-parallel for one with cp, the zero presets are for "
            "training steps. manual: the model is the program of one rank and already contains "
            "onnxpar's collectives, like the body of JAX's shard_map; the tensors of --strategy "
            "say how to shard inputs and weights and how to put outputs together, and all others "
            "stay whole",
            NEEDED,
            "NAME",
            decided=(DUMP,),
        ),
    ]
    memory_limit: Annotated[
        float | str | None,
        Option(
            "most bytes that a rank may hold at any time, such as 16GB: weights, states and the "
            "results of nodes. The search uses only strategies within the limit; it is an error if "
            "there is none, or if the given strategy needs more",
            NEEDED,
            "SIZE",
            field="objective.memory",
            decided=_BOTH,
        ),
    ]
    dims: Annotated[
        Mapping[str, int | str] | None,
        Option(
            "size of a symbolic dimension: a number, or an expression of other symbols, which "
            "ties them: s74=s2, total=past+seq. Others stay open: the sharded model runs with any",
            NEEDED,
            "NAME=SIZE",
            flag="dim",
            decided=(DUMP,),
        ),
    ]
    strategy: Annotated[
        str | os.PathLike[str] | Mapping[str, Any] | Strategy | None,
        Option(
            "YAML file with the keys mesh, shard (how to split nodes) and tensors (how to split "
            "tensors), or the same structure; --preset or --search, if given, decides the rest",
            SPLIT,
            "FILE",
            decided=(DUMP,),
        ),
    ]
    dataset_strategy: Annotated[
        str | Sequence[Sequence[int]] | None,
        Option(
            "layout of all data inputs, as in MindSpore: data_parallel (the first dimension over "
            "all ranks), full_batch (every rank holds them whole), or the number of shards of each "
            "dimension of each input: '[[8, 1], [8]]'",
            SPLIT,
            "LAYOUT",
            field="dataset",
            decided=(DUMP,),
        ),
    ]
    configuration: Annotated[
        str | None,
        Option(
            "which multi-device annotations of the model to follow, or none; default: those for "
            "the number of ranks. A strategy adds to them and must not contradict them; --preset "
            "or --search, if given, decides the rest. Pipeline stages in them are ignored",
            SPLIT,
            "NAME",
            decided=_BOTH,
        ),
    ]
    search: Annotated[
        Literal["auto", "data-parallel", "tensor-parallel", "exhaustive", "propagation"] | None,
        Option(
            "auto, the default without --preset, --strategy and annotations: find the fastest "
            "strategy by the cost model of --topology, and the mesh if none is given; requests of "
            "a strategy file are met. The other choices are for comparison: a preset; exhaustive, "
            "which tries all strategies of a small model; propagation, which shards only what a "
            "strategy or annotations request, and what follows from that",
            DECIDE,
            decided=_BOTH,
        ),
    ]
    objective: Annotated[
        Literal["latency", "throughput"] | None,
        Option(
            "what the search minimizes. latency: the time of a run; throughput: the time from one "
            "run to the next where several runs overlap, so that communication and compute "
            "overlap. Default: latency",
            DECIDE,
            field="objective.goal",
            decided=_BOTH,
        ),
    ]
    untied: Annotated[
        bool,
        Option(
            "let the search choose a strategy for each of several equal blocks, instead of one "
            "for all of them. This takes longer; it helps if a memory limit forces only some of "
            "the blocks into a slower strategy",
            DECIDE,
            field="objective.untied",
            decided=_BOTH,
        ),
    ]
    strict: Annotated[bool, Option("fail if an op has no sharding rule", DECIDE, decided=_BOTH)]
    check_layouts: Annotated[bool, Option("check layouts after every pass, as the commands do")]
    topology: Annotated[
        str | os.PathLike[str] | Mapping[str, Any] | Topology | None,
        Option(
            "YAML file with the levels of links between ranks and the speed and memory of a rank, "
            "such as calibrate writes, or the same structure; a rank table of MindSpore or HCCL; "
            "or machines by name: 64-core, or 8x64-core,25GbE for eight hosts. Default: this host, "
            "which is measured once, in some seconds, and the result kept",
            HARDWARE,
            "FILE",
            decided=_BOTH,
        ),
    ]
    for_any_host: Annotated[
        bool,
        Option(
            "without --topology, make the same plan on every machine, from constants, and promise "
            "no times; this host is not measured",
            HARDWARE,
            field="on_any_host",
        ),
    ]
    balance: Annotated[
        bool,
        Option(
            "give ranks whose devices differ in --topology parts in proportion to their speed, as "
            "far as their memory allows. Default: equal parts",
            HARDWARE,
            decided=_BOTH,
        ),
    ]
    typical: Annotated[
        str | Mapping[str, int] | Sequence[tuple[Mapping[str, int], float]] | Typical | None,
        Option(
            "usual values of open sizes, such as batch=1,seq=128. The search and all costs assume "
            "these values; the sharded model runs with any. For a mix, give several, each with a "
            "weight: batch=1,seq=1:0.9. Default: a batch of 1, and lengths of 128 or what the "
            "model allows",
            SIZES,
            "NAME=N,..",
            field="typical.profiles",
            repeated=True,
            decided=(DUMP,),
        ),
    ]
    states: Annotated[
        Mapping[str, str] | Sequence[tuple[str, str]],
        Option(
            "a state pair: an output that the next run gets as an input; in addition to the pairs "
            "that are found by ops and by names",
            SIZES,
            "IN=OUT",
            flag="state",
            decided=(DUMP,),
        ),
    ]
    find_states: Annotated[
        bool,
        Option(
            "use only the state pairs given by --state; look for no others",
            SIZES,
            flag="only-given-states",
            default=True,
            decided=(DUMP,),
        ),
    ]
    page_size: Annotated[
        int | None,
        Option(
            "put the caches of a language model's decoder in pages of N tokens, so that texts of "
            "any lengths run together, and join and leave between runs, as in serve. Default for a "
            "folder of a language model whose caches can be in pages: 16; else 0, which leaves "
            "caches as the model has them. check and annotate always use the model without pages",
            LANGUAGE,
            decided=(DUMP,),
        ),
    ]
    kv_dtype: Annotated[
        Literal["float32", "float16", "int8"] | None,
        Option(
            "the type of caches in pages. float16 takes half the memory of float32, int8 little "
            "more than a quarter, with a scale for each key and value; default: as in the model",
            LANGUAGE,
            decided=(DUMP,),
        ),
    ]
    plugin: Annotated[
        Sequence[str],
        Option(
            "import passes and sharding rules of your own: a module, or a file x.py; installed "
            "packages add theirs by entry points (see docs/how-to/pass.md)",
            EXTENSIONS,
            "MODULE",
        ),
    ]
    libraries: Annotated[
        Sequence[str | os.PathLike[str]], Option(LIBRARY_HELP, EXTENSIONS, "FILE", flag="library")
    ]


class PlanOptions(LayoutOptions, total=False):
    """Options that decide a plan: those of `LayoutOptions`, and further ones."""

    fusion: Annotated[
        str | None,
        Option(
            "how to join collectives that do not wait for each other. size: up to --bucket-mb; "
            "cost (default for training steps): in buckets whose last one ends first by the cost "
            "model, if --overlap lets ranks communicate while they compute, otherwise as size; "
            "index:20,35: the reductions of the first 20 gradients, then of the next 15, then of "
            "the rest, in the order in which they run; or none",
            TRAINING,
            "{" + ",".join((*FUSIONS, "index:N,..")) + "}",
            decided=(MANUAL_PROGRAM,),
        ),
    ]
    overlap: Annotated[
        Literal["auto", "on", "off"] | None,
        Option(
            "whether a thread of each rank communicates while the rank computes. auto (default): "
            "collectives between hosts that gain by it, by the cost model of --topology; on: all "
            "that have something in between; off: none",
            TRAINING,
            decided=(MANUAL_PROGRAM,),
        ),
    ]
    bucket_mb: Annotated[
        float | None,
        Option(
            "largest fused collective, in MiB; default: 64 for all-reduces, 8 for reduce-scatters "
            "and all-gathers",
            TRAINING,
            field="bucket_bytes",
            decided=(MANUAL_PROGRAM,),
        ),
    ]
    compression: Annotated[
        str | None,
        Option(
            "format in which ranks send gradients of a training step: float16 or bfloat16, added "
            "up in float32; 2bit:T, where a rank sends T, 0 or -T for each element and keeps the "
            "rest for later steps (T should be near the largest elements; default "
            f"{THRESHOLD}); or none",
            TRAINING,
            "KIND",
            decided=(MANUAL_PROGRAM,),
        ),
    ]
    place: Annotated[
        Mapping[str, str] | Sequence[str],
        Option(
            "keep a table, by glob, and its optimizer state in files instead of memory; ranks have "
            "in memory the rows that they use. Nodes must look up its rows, and a training step "
            "must update them lazily (`onnxpar grad --lazy`)",
            HARDWARE,
            "TABLE=host",
            decided=_BOTH,
        ),
    ]
    passes: Annotated[
        Sequence[str | Pass | Placed],
        Option(
            "also run a pass of a plugin: 'NAME{option=value}' for one that rewrites the model, "
            "'NAME before PASS' or 'NAME after PASS' for any place; `opt --passes list` shows all",
            EXTENSIONS,
            "PASS",
            flag="add-pass",
        ),
    ]


Kind = type[LayoutOptions] | type[PlanOptions]

for _kind in (LayoutOptions, PlanOptions):
    _kind.__doc__ = option_lines(_kind)
