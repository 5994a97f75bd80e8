"""Ops that are whole by nature, and why: a plan prints the reason, and never calls it a lack."""

from onnxpar.rules.rule import whole_op

whole_op("NonZero Unique NonMaxSuppression", "how large its results are depends on its data")
whole_op(
    "SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength "
    "SequenceMap SplitToSequence ConcatFromSequence",
    "a sequence of tensors is handed on whole",
)
whole_op("Optional OptionalGetElement OptionalHasElement", "an optional value is handed on whole")
whole_op(
    "StringConcat StringNormalizer StringSplit RegexFullMatch",
    "collectives carry no strings",
)
whole_op("ImageDecoder", "an encoded image decodes from its first byte on")
whole_op(
    "BlackmanWindow HammingWindow HannWindow MelWeightMatrix",
    "it has scalars for operands, of which there is nothing to split",
)
whole_op("Shape Size", "its values are global sizes")
whole_op("Constant", "it has no operands")
