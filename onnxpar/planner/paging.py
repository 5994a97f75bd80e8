"""Decides whether the caches of a language model are divided into pages."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.paged_attention import COMPUTE, PAGED_ATTENTION, UnpagedError
from onnxpar.load.next_step import next_outputs
from onnxpar.load.page_caches import usual_page_size
from onnxpar.load.page_ports import PICKS, ROWS
from onnxpar.planner.encoder_decoders import decoder_by_default
from onnxpar.planner.options import Options
from onnxpar.sharding.carried_rows import mixing_node
from onnxpar.sharding.graph_factors import GraphFactors


def paged_by_default(model: object, options: Options) -> Options:
    """Returns the options with the usual page size, if the model is a folder of a language model
    and the user gave no size; for an encoder-decoder, the options for its decoder. Errors:
    ModelError if the folder has several models; StrategyError for a dtype of caches without pages.
    """
    options = decoder_by_default(model, options)
    if options.page_size is None and isinstance(model, (str, os.PathLike)):
        size = usual_page_size(Path(model))
        options = replace(options, page_size=size, pages_if_possible=options.kv_dtype is None)
    if options.kv_dtype is not None and not options.page_size:
        raise StrategyError(
            f"--kv-dtype {options.kv_dtype}: only caches in pages can have another type than in "
            "the model; give --page-size 16, too"
        )
    return options


def check_tokens_apart(graph: gs.Graph, factors: GraphFactors) -> None:
    """Checks that a decoder with caches in pages mixes tokens only in its attention, because in a
    step, neighboring tokens may be of different texts. Errors: UnpagedError if another node may mix
    tokens, as a convolution over tokens does."""
    paged = {n.name for n in graph.nodes if n.op == PAGED_ATTENTION and n.domain == COMPUTE}
    ends = next_outputs(graph)
    paged |= {n.name for n in graph.nodes if n.outputs[0].name in ends}
    picks = {n.name for n in graph.nodes if n.op == "Gather" and n.inputs[1].name == PICKS}
    tokens = factors.tensors[ROWS].leaves[0].atom
    node = mixing_node(factors, tokens, paged | picks)
    if node is not None:
        raise UnpagedError(
            f"{node.op} {node.name!r} may mix tokens, and in a step tokens of different texts are "
            "neighbors"
        )


def refuse_paging(options: Options, command: str) -> None:
    """Raises StrategyError for options about pages, for a command that works on the model's own
    inputs."""
    if options.page_size or options.kv_dtype:
        flag = "--page-size" if options.page_size else "--kv-dtype"
        raise StrategyError(
            f"{flag}: {command} works with the inputs of the model as it is, and pages add "
            f"others; leave {flag} out"
        )
