"""Registers the ops whose kernels in onnxruntime do not accept empty tensors: they fail, crash, or
return uninitialized memory. `onnxpar/testing` finds them: it runs each op of onnxruntime 1.32 on
empty shards.

Factors with a communicating lowering are not listed: the lowering handles empty shards.
"""

from __future__ import annotations

from onnxpar.graph.attribute_weights import ML
from onnxpar.rules.rule import no_empty_parts

CONTRIB = "com.microsoft"

no_empty_parts("Attention GlobalMaxPool")
no_empty_parts("MaxPool AveragePool LpPool GlobalAveragePool GlobalLpPool", "c h")
no_empty_parts("Conv ConvTranspose", "g h")
no_empty_parts("QLinearConv", "g h o")
no_empty_parts("ConvInteger", "g c h")
no_empty_parts("DeformConv", "g o c")
no_empty_parts("Col2Im", "c")
no_empty_parts("GroupNormalization", "n g")
no_empty_parts("SoftmaxCrossEntropyLoss", "n s")
no_empty_parts("LSTM GRU RNN", "b d")
no_empty_parts("RotaryEmbedding", "h")
no_empty_parts("MatMulInteger", "k m")
no_empty_parts("TfIdfVectorizer", "b")
no_empty_parts("Attention QAttention MultiHeadAttention GroupQueryAttention", domain=CONTRIB)
no_empty_parts("DecoderMaskedMultiHeadAttention", domain=CONTRIB)
no_empty_parts("MatMulBnb4", "n", domain=CONTRIB)
no_empty_parts("GatedAdd LinearAttentionGate", domain=CONTRIB)
no_empty_parts("MoE QMoE", "t b s e", domain=CONTRIB)
no_empty_parts("RotaryEmbedding", "h", domain=CONTRIB)
no_empty_parts("QLinearConv", "g o", domain=CONTRIB)
no_empty_parts("NhwcMaxPool QLinearAveragePool MaxpoolWithMask", "c", domain=CONTRIB)
no_empty_parts("OneHotEncoder LinearRegressor", "c", domain=ML)
no_empty_parts("ArrayFeatureExtractor", "i", domain=ML)
no_empty_parts("LinearAttention CausalConvWithState")  # onnxruntime runs their function bodies
no_empty_parts("LinearAttention", "k g e", domain=CONTRIB)
no_empty_parts("CDist", "k", domain=CONTRIB)
no_empty_parts("ConvTransposeWithDynamicPads", "g", domain=CONTRIB)
no_empty_parts("HyperConnectionPreMix HyperConnectionPostMix", "c h", domain=CONTRIB)
no_empty_parts("GatedDeltaNet VarlenCausalConvWithState AttnLSTM", domain=CONTRIB)
no_empty_parts("MoEGroupRouter WordConvEmbedding MatMulFpQ4", domain=CONTRIB)
