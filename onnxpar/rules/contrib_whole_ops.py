"""Registers onnxruntime's own ops that must stay whole, with the reason."""

from __future__ import annotations

from onnxpar.rules.rule import whole_op

DOMAIN = "com.microsoft"

REASONS = {
    "the loader decomposes it": ("FusedConv FusedGemm DynamicQuantizeMatMul MatMulIntegerToFloat"),
    "onnxruntime has no CPU kernel for it": (
        "BiasAdd BiasDropout BiasSoftmax BiasSplitGelu BitmaskBiasDropout BitmaskDropout"
        " ComplexMul ComplexMulConj ConvStateReplay DecoderAttention DecoderMaskedSelfAttention"
        " DequantizeBFP DequantizeWithOrder DynamicSparseAttention FusedMatMulActivation"
        " GatedDeltaNetStateReplay GatedRelativePositionBias GemmFastGelu GemmFloat8"
        " GemmaRotaryEmbedding GroupNorm HyperConnectionLowRankMix Irfft IsAllFinite"
        " LongformerAttention Mamba2Verify MatMulBlockQuantizedFp4Weight"
        " MatMulBlockQuantizedFp8Weight MatMulNBitsMlp MatMulNBitsQLoRA MatMulNBitsQkv"
        " MatMulPacked MoEPacked MulInteger NhwcConv NhwcFusedConv PackedAttention"
        " PackedMultiHeadAttention PackedSparseAttentionIndexer"
        " PackedSparseAttentionIndexerMerge PagedAttention QLinearReduceMean QOrderedAttention"
        " QOrderedGelu QOrderedLayerNormalization QOrderedLongformerAttention QOrderedMatMul"
        " QuantizeBFP QuantizeWithOrder RMSNormRotary ReduceSumInteger RelativePositionBias"
        " RemovePadding RestorePadding Rfft RouterGateUpProj SkipGroupNorm"
        " SparseAttentionIndexer SparsePagedAttention SpeculativePrefixCommit SwiGLU"
        " TorchEmbedding"
    ),
    "it runs a model inside the op": "BeamSearch GreedySearch Sampling WhisperBeamSearch",
    "it runs on another kind of device": "EPContext Snpe",
    "its quantization range covers all elements of a step": "DynamicQuantizeLSTM",
    "a best path or the first difference depends on all elements before": (
        "BifurcationDetector DynamicTimeWarping"
    ),
    "requests of any length follow each other in one row": "VarlenNGramHashMapping",
    "its kernel writes into its caches, whose memory a session must share": "SparseAttention",
    "the elements of its result are data-dependent": "Unique",
    "collectives cannot send strings": "Tokenizer",
    "a sparse tensor is passed on whole": "SparseToDenseMatMul",
}
"""Names of ops that stay whole, by the reason that plans print for them."""


for _reason, _ops in REASONS.items():
    whole_op(_ops, _reason, DOMAIN)
