"""Ops that have no gradient, and why: an error says so where they lie on a gradient's way."""

from onnxpar.grad.vjp import no_gradient

no_gradient("Unique", "how many results it has depends on its data")
no_gradient("BitCast", "the same bits are another number")
no_gradient(
    "SequenceAt SequenceConstruct SequenceErase SequenceInsert SequenceMap SplitToSequence "
    "ConcatFromSequence",
    "gradients do not pass through sequences of tensors; use Split, Concat and Gather",
    carries=True,
)
no_gradient(
    "Optional OptionalGetElement", "gradients do not pass through optional values", carries=True
)
no_gradient(
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear MatMulInteger QLinearMatMul",
    "rounded numbers have no slope; train a model before it is quantized",
    carries=True,
)
