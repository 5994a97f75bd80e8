"""Warnings about weights that a training step trains differently from PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import onnx_graphsurgeon as gs

from onnxpar.graph.exported import PARAMETER
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.load.load import Model
from onnxpar.training.batch_norm import BatchNorm, numbers_of
from onnxpar.training.gradients.constant_values import first_values, repeats_rows
from onnxpar.training.gradients.trained import FROZEN, HELD, STOPPED, UNNAMED, Left, Weights
from onnxpar.training.margins import MARGINS
from onnxpar.training.probabilities import is_probability, made_by

_PLAIN = "torch.onnx.export(..., dynamo=True, optimize=False)"
_TRAINING = (
    f"{_PLAIN} (and give --batch-norm global), or with dynamo=False, "
    "training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False"
)
_MOVED = re.compile(
    r"val_\d+$|(t|transpose|permute|view|reshape|(un)?squeeze|expand|slice|select|embedding|clone)"
    r"(_\d+)?$"
)
"""Matches names that the exporter gives to parameters that it reshaped, transposed or sliced."""
_FOLDED = re.compile(r"onnx::Conv_\d+$")
"""Matches names that the exporter gives to weights of a Conv into which it folded a
BatchNormalization."""
_STATISTICS = ".running_mean"
_MANY = 100
"""With this many numbers, the unbiased variance is 1 % larger."""


def cautions_of(model: Model, weights: Weights) -> list[str]:
    """Returns sentences about weights that a step trains differently from the exported PyTorch
    network, or may train differently."""
    return [
        *(_of_left(left) for left in weights.left if _is_missed(left)),
        *_of_folded(model, weights),
        *_of_shared(weights, model.shared),
        *_of_copies(model, weights),
    ]


def cautions_of_probabilities(graph: gs.Graph, loss: str, output: str | None) -> Iterator[str]:
    """Yields a sentence if it is not evident whether the loss bce takes an output as probabilities
    or as scores. `output` is None if the model has only one."""
    named = [t for t in graph.outputs if output in (None, t.name)]
    node = made_by(named[0])[0] if loss == "bce" and named else None
    if node is None or node.op == "Sigmoid":
        return
    name, maker = named[0].name, f"{node.op} '{node.name}'"
    if is_probability(named[0]):
        yield f"the loss bce takes {name!r} as probabilities: {maker} makes numbers from 0 to 1"
    elif any(map(is_probability, node.inputs)):
        yield (
            f"the loss bce takes {name!r} as scores before a sigmoid, but {maker} reads "
            "probabilities; end the model in probabilities, or in their scores"
        )


_NORMALIZE = ("LpNormalization", "Div", "Mul")
_MOVE = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Identity", "Clip", "Flatten")


def cautions_of_cosines(graph: gs.Graph, loss: str, output: str | None) -> Iterator[str]:
    """Yields a sentence if a margin softmax (arcface, cosface) is to be computed from a product
    whose operands are not both normalized: then the scores are no cosines."""
    named = [t for t in graph.outputs if output in (None, t.name)]
    if loss not in MARGINS or not named:
        return
    product = _source(named[0])
    if product is None or product.op not in ("MatMul", "Gemm"):
        return
    for operand in product.inputs[:2]:
        source = _source(operand)
        if source is None or source.op not in _NORMALIZE:
            yield (
                f"the loss {loss} takes {named[0].name!r} as cosines, but {product.op} "
                f"'{product.name}' reads {operand.name!r}, which no node normalizes; normalize "
                "embeddings and class centres in the model"
            )


def _source(tensor: gs.Tensor) -> gs.Node | None:
    """Returns the node that computes a tensor, before nodes that only move the tensor's elements;
    None for an input or a constant."""
    while tensor.inputs and tensor.inputs[0].op in _MOVE:
        tensor = tensor.inputs[0].inputs[0]
    return tensor.inputs[0] if tensor.inputs else None


def _is_missed(left: Left) -> bool:
    """True if an untrained tensor deserves a warning: it has at least two dimensions, and the user
    has neither frozen it nor chosen other weights."""
    if left.reason in (FROZEN, UNNAMED, STOPPED) or len(left.tensor.shape) < 2:
        return False
    return left.reason != HELD or left.in_role


def _of_left(left: Left) -> str:
    """Returns a sentence about a tensor that is not trained, with the reason."""
    return f"{left.name} ({_text(left.tensor.shape)}) is not trained: {left.reason}"


def _of_folded(model: Model, weights: Weights) -> Iterator[str]:
    """Yields sentences about weights that the exporter computed from parameters, or whose rows it
    repeated."""
    missing = [n for n, kind in model.exported.items() if kind == PARAMETER]
    missing = [n for n in missing if n not in model.stored]
    computed = [
        t.name for t in weights.trained if t.name not in model.exported and not _MOVED.match(t.name)
    ]
    if missing and computed:
        yield (
            f"{_list(computed)}: the exporter computed these from parameters that are not in the "
            f"file ({_list(missing)}). The computed tensors are trained instead, so training "
            f"differs from PyTorch's; to keep the parameters, export with {_PLAIN}"
        )
    candidates = [t for t in weights.trained if t.name not in computed and t.node.op != "MatMul"]
    if model.exported:
        candidates = [t for t in candidates if t.name not in model.exported]
    else:
        candidates = [t for t in candidates if t.name.startswith("onnx::")]
    repeated = [t.name for t in candidates if repeats_rows(first_values(t.tensor, model.folder))]
    if repeated:
        yield (
            f"{_list(repeated)}: the exporter repeated rows of a parameter here, and each copy is "
            f"trained on its own; to keep the parameter, export with {_PLAIN}"
        )


def _of_shared(weights: Weights, shared: Mapping[str, int]) -> Iterator[str]:
    """Yields a sentence about scale or bias vectors that several nodes read: an exporter that
    stores equal tensors once merges parameters that are equal before training. `shared` has the
    number of readers, by name."""
    tied = {t.name: shared[t.name] for t in weights.trained if t.name in shared}
    if tied:
        texts = [f"{name} (read by {count} nodes)" for name, count in tied.items()]
        yield (
            f"{_list(texts)}: several nodes read the same tensor as their scale or bias, so they "
            "share one parameter. An exporter that stores equal tensors once does this to an "
            f"untrained network. To give each node its own parameter, use --untie, or export with "
            f"{_PLAIN}"
        )


def _of_copies(model: Model, weights: Weights) -> Iterator[str]:
    """Yields a sentence about matrices that are trained as one parameter only because they are
    equal in the file."""
    called = model.called.torch
    tied = {w.name: called[w.name] for w in weights.trained if w.name in called}
    texts = [
        f"{name} (and {', '.join(n for n in torch.stored if n != name)})"
        for name, torch in tied.items()
        if len(torch.stored) > 1 and not torch.is_certain
    ]
    if texts:
        each = " each" if len(texts) > 1 else ""
        yield (
            f"{_list(texts)}: equal in the file, and trained as one parameter{each}; if they are "
            f"different parameters in PyTorch, export with {_PLAIN}"
        )


def cautions_of_batch_norm(model: Model, options: BatchNorm) -> Iterator[str]:
    """Yields a sentence if BatchNormalization was exported for inference, or was folded into
    weights."""
    nodes = list(all_nodes(model.graph))
    norms = [n for n in nodes if n.op == "BatchNormalization"]
    idle = [str(n.name) for n in norms if not n.attrs.get("training_mode")]
    if idle and options.statistics is None:
        yield (
            f"{_list(idle)}: BatchNormalization was exported for inference: it uses its running "
            "statistics and never updates them; --batch-norm global takes statistics of the batch"
        )
    if norms:
        return
    folded = [str(n.name) for n in nodes if n.op == "Conv" and _FOLDED.match(n.inputs[1].name)]
    folded += [n.removesuffix(_STATISTICS) for n in model.exported if n.endswith(_STATISTICS)]
    if folded:
        is_gone = all(node.op != "Dropout" for node in nodes)
        gone = " If the network had Dropout, the export has removed it, too." if is_gone else ""
        yield (
            f"{_list(folded)}: a batch-norm was folded into the weights, so its statistics never "
            f"change, and its scale and shift are not trained.{gone} To keep them, export after "
            f"network.train() with {_TRAINING}"
        )


def cautions_of_variance(graph: gs.Graph, options: BatchNorm) -> Iterator[str]:
    """Yields a sentence if running variances differ noticeably from PyTorch's."""
    if options.variance is not None:
        return
    norms = [n for n in all_nodes(graph) if n.op == "BatchNormalization"]
    counts = [
        (numbers_of(n, options.groups), str(n.name))
        for n in norms
        if options.statistics is not None or n.attrs.get("training_mode")
    ]
    few = [(count, name) for count, name in counts if 1 < count <= _MANY]
    if few:
        least = min(count for count, _ in few)
        yield (
            f"{_list([name for _, name in few])}: the running variance moves by the variance of "
            f"{least} numbers, as ONNX says, where PyTorch takes {least}/{least - 1} of it; "
            "--batch-norm unbiased does as PyTorch (biased: this is meant)"
        )


def _text(shape: Sequence[int]) -> str:
    """Returns a shape as text, such as 4x6."""
    return "x".join(map(str, shape))


def _list(names: Sequence[str]) -> str:
    """Returns the first three names as text, and the number of further names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
