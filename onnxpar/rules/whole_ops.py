"""Registers ops that cannot be split, with the reason that a plan prints instead of "no rule"."""

from onnxpar.rules.rule import whole_op

whole_op("NonZero Unique NonMaxSuppression", "the size of its results is data-dependent")
whole_op(
    "SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength "
    "SequenceMap SplitToSequence ConcatFromSequence",
    "a sequence of tensors is passed on whole",
)
whole_op("Optional OptionalGetElement OptionalHasElement", "an optional value is passed on whole")
whole_op(
    "StringConcat StringNormalizer StringSplit RegexFullMatch",
    "collectives cannot send strings",
)
whole_op("ImageDecoder", "an encoded image can only be decoded as a whole")
whole_op(
    "BlackmanWindow HammingWindow HannWindow MelWeightMatrix",
    "all its operands are scalars, which cannot be split",
)
whole_op("SwiGLU", "the loader writes it as Sigmoid and Mul, which can be split")
whole_op("Shape Size", "its values are global sizes")
whole_op("Constant", "it has no operands")
