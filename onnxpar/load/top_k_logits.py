"""Adds outputs to a decoder with which the next token can be chosen: the likeliest tokens with
their logits, and sums of probabilities over the vocabulary.

Ordinary nodes compute them, which are split like others where logits are split over the vocabulary:
a rank finds the best of its own tokens, and sums are all-reduced. So the logits, which are large,
stay on the ranks.
"""

from __future__ import annotations

from typing import Any

from onnx import GraphProto, NodeProto, TensorProto, helper

TEMPERATURES, ASKED = "temperatures", "asked_tokens"
"""Inputs: divisors of the logits for the second sum, (picks, 1); and ids of tokens whose logits are
returned in any case, (picks, asked)."""
BEST_TOKENS, BEST_LOGITS, ASKED_LOGITS, LOG_TOTALS = (
    "best_tokens",
    "best_logits",
    "asked_logits",
    "log_totals",
)
"""Outputs: the likeliest tokens, the best first, (picks, best), and their logits, in float32; the
logits of those that were asked for, (picks, asked); and the logarithms of two sums over all tokens,
(picks, 2): of exp(logit - best logit), and of exp((logit - best logit) / temperature)."""
PICK_DIM, ASKED_DIM = "picks", "asked"
OLDEST = 11
"""The least opset whose ops agree with the added ones."""
BEST = 64
"""The number of likeliest tokens that are returned, if there are as many."""


def add_candidates(graph: GraphProto, logits: str, opset: int) -> None:
    """Adds the nodes, inputs and outputs to a decoder, in place.

    logits  the name of the decoder's output, (1, picks, vocabulary)
    opset   the version of ONNX's ops in the model, at least OLDEST
    """
    nodes: list[NodeProto] = []
    vocabulary = next(o for o in graph.output if o.name == logits).type.tensor_type.shape.dim[2]
    count = min(BEST, vocabulary.dim_value or BEST)

    def add(op: str, *operands: str, results: int = 1, name: str = "", **attrs: Any) -> list[str]:
        names = [name or f"candidates/{op}_{len(nodes)}"]
        names += [f"{names[0]}_{i}" for i in range(1, results)]
        nodes.append(helper.make_node(op, operands, names, names[0], **attrs))
        return names

    def constant(*values: int) -> str:
        tensor = helper.make_tensor("value", TensorProto.INT64, [len(values)], values)
        return add("Constant", value=tensor)[0]

    zero, one = constant(0), constant(1)
    first = add("Constant", value=helper.make_tensor("value", TensorProto.INT64, [], [0]))[0]
    (rows,) = add("Gather", logits, first, axis=0)
    (x,) = add("Cast", rows, to=TensorProto.FLOAT)
    best, tokens = add("TopK", x, constant(count), results=2, axis=1)
    (top,) = add("Slice", best, zero, one, one)
    (below,) = add("Sub", x, top)
    (cooled,) = add("Div", below, TEMPERATURES)
    powers = [add("Exp", each)[0] for each in (below, cooled)]
    if opset < 13:
        sums = [add("ReduceSum", each, keepdims=1, axes=[1])[0] for each in powers]
    else:
        sums = [add("ReduceSum", each, one, keepdims=1)[0] for each in powers]
    add("Log", add("Concat", *sums, axis=1)[0], name=LOG_TOTALS)
    add("Identity", best, name=BEST_LOGITS)
    add("Identity", tokens, name=BEST_TOKENS)
    add("GatherElements", x, ASKED, name=ASKED_LOGITS, axis=1)
    graph.node.extend(nodes)
    float32, int64 = TensorProto.FLOAT, TensorProto.INT64
    for port, dtype, width in ((TEMPERATURES, float32, 1), (ASKED, int64, ASKED_DIM)):
        graph.input.append(helper.make_tensor_value_info(port, dtype, [PICK_DIM, width]))
    for port, dtype, width in (
        (BEST_TOKENS, int64, count),
        (BEST_LOGITS, float32, count),
        (ASKED_LOGITS, float32, ASKED_DIM),
        (LOG_TOTALS, float32, 2),
    ):
        graph.output.append(helper.make_tensor_value_info(port, dtype, [PICK_DIM, width]))
