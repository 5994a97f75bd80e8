"""Rules of Fourier transforms, and of counts of n-grams."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, constant, given, tensor_shape
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import FIRST, Lowering, Rule, einsum, names, rule, whole_rule
from onnxpar.rules.windows import one_window

_FREQUENCY = "every frequency needs all of it"
_COMPLEX = "the real and imaginary parts of one number"
_UNKNOWN_AXIS = "a data-dependent axis"


@rule("DFT")
def dft(node: gs.Node) -> Rule:
    """Sharding rule of DFT: `b t _ -> b f _`; t, the transformed axis, must stay whole."""
    shape = tensor_shape(node.inputs[0]) or ()
    operand = given(node, 2)
    value = None if operand is None else constant(operand)
    if operand is not None and value is None:
        return whole_rule(node, _UNKNOWN_AXIS)
    axis = node.attrs.get("axis") if value is None else int(value.reshape(-1)[0])
    axes = {1, len(shape) - 2} if axis is None else {axis % len(shape)}  # opset 17: 1; opset 20: -2
    before, after = ([*names("d", len(shape) - 1), c] for c in ("k", "o"))
    for i in axes:
        before[i], after[i] = f"t{i}", f"f{i}"
    moved = [name for i in axes for name in (before[i], after[i])]
    rest = ", _" * (len(node.inputs) - 1)
    return einsum(
        node,
        f"{dims_text(before)}{rest} -> {dims_text(after)}",
        whole={**dict.fromkeys(moved, _FREQUENCY), **dict.fromkeys("ko", _COMPLEX)},
        linear=(FIRST,),
    )


@rule("STFT")
def stft(node: gs.Node) -> Rule:
    """Sharding rule of STFT: `b t _, _ -> b s f _`: the signal t and the frames s are split over
    the same axes, and a rank fetches the elements of its frames. onnxruntime also takes a signal
    without the last dimension."""
    parts = " k" if len(tensor_shape(node.inputs[0]) or ()) > 2 else ""
    rest = parts + ", _" * (len(node.inputs) - 1)
    whole = {"f": _FREQUENCY, **dict.fromkeys("ko" if parts else "o", _COMPLEX)}
    frames = _frames(node)
    if frames is None:
        return einsum(
            node,
            f"b t{rest} -> b s f o",
            whole={**whole, **dict.fromkeys("ts", "frames of data-dependent lengths")},
            linear=(FIRST,),
        )
    step, length = frames
    size, count = (tensor_shape(t) or (None, None) for t in (node.inputs[0], node.outputs[0]))
    space = one_window(size[1], count[1], length, step)

    def lower(build: Lowering) -> None:
        signal, _ = space.read(build, build.input(0), None, 1)
        others = [build.input(i) for i in range(1, len(node.inputs))]
        build.finish("STFT", [signal, *others], **node.attrs)

    return einsum(
        node,
        f"b {space.before[0]}{rest} -> b {space.after[0]} f o",
        whole={**whole, **space.whole},
        linear=(FIRST,),
        lower=lower,
        nonempty=frozenset(space.after),
        **space.fields(),
    )


def _frames(node: gs.Node) -> tuple[int, int] | None:
    """Returns (step from one frame to the next, length of a frame); None if one of them is
    unknown."""
    window, length = given(node, 2), given(node, 3)
    step = constant(node.inputs[1])
    size: Size = None
    if length is not None:
        stored = constant(length)
        size = None if stored is None else int(stored.reshape(-1)[0])
    elif window is not None:
        size = (tensor_shape(window) or (None,))[0]
    if step is None or size is None:
        return None
    return int(step.reshape(-1)[0]), size


@rule("TfIdfVectorizer")
def tfidf_vectorizer(node: gs.Node) -> Rule:
    """Sharding rule of TfIdfVectorizer: `b t -> b _`; t must stay whole, because n-grams may cross
    the boundary of shards."""
    batch = names("b", len(tensor_shape(node.inputs[0]) or ()) - 1)
    return einsum(
        node,
        f"{dims_text([*batch, 't'])} -> {dims_text([*batch, 'o'])}",
        whole={
            "t": "an n-gram may cross the boundary of shards",
            "o": "every count needs the whole sequence",
        },
    )
