"""onnxruntime's own ops that stay whole, and why."""

from __future__ import annotations

from onnxpar.rules.rule import whole_op

DOMAIN = "com.microsoft"

REASONS = {
    "it is taken apart when the model is loaded": (
        "FusedConv FusedGemm DynamicQuantizeMatMul MatMulIntegerToFloat"
    ),
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
    "it runs a model of its own": "BeamSearch GreedySearch Sampling WhisperBeamSearch",
    "it belongs to another device": "EPContext Snpe",
    "its rows are packed in formats of their own": "GatherPacked",
    "it may project, score and select at once": "MoEGroupRouter",
    "its blocks run on from row to row": "MatMulBnb4 MatMulFpQ4",
    "its range is that of all elements at each step": "DynamicQuantizeLSTM",
    "every step needs all that came before": (
        "AttnLSTM BifurcationDetector CausalConvWithState DynamicTimeWarping GatedDeltaNet"
        " LinearAttention NGramHashMapping VarlenCausalConvWithState VarlenNGramHashMapping"
    ),
    "which elements it makes depends on their values": "Tokenizer Unique SparseToDenseMatMul",
    "its values are global positions": "Range",
    "it counts positions and looks up tables at once": "QEmbedLayerNormalization",
    "its pads may be computed by other nodes": "Pad",
    "its masks and caches count through the whole batch and all heads": (
        "MRotaryEmbedding SparseAttention"
    ),
    "its branches are mixed": "EngramGate HyperConnectionPostMix HyperConnectionPreMix",
    "a word's characters make one row": "WordConvEmbedding",
}
"""Ops by the reason that a plan gives."""


for _reason, _ops in REASONS.items():
    whole_op(_ops, _reason, DOMAIN)
