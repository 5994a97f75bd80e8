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
    "its rows are packed in special formats": "GatherPacked",
    "it may project, score and select in one op": "MoEGroupRouter",
    "its blocks continue from one row to the next": "MatMulFpQ4",
    "its quantization range covers all elements of a step": "DynamicQuantizeLSTM",
    "every step needs all earlier steps": (
        "AttnLSTM BifurcationDetector DynamicTimeWarping GatedDeltaNet"
        " VarlenCausalConvWithState VarlenNGramHashMapping"
    ),
    "the elements of its result are data-dependent": "Tokenizer Unique SparseToDenseMatMul",
    "its values are global positions": "Range",
    "its masks and caches refer to the whole batch and all heads": "SparseAttention",
    "the characters of a word form one row": "WordConvEmbedding",
}
"""Names of ops, by the reason that plans print for them."""


for _reason, _ops in REASONS.items():
    whole_op(_ops, _reason, DOMAIN)
