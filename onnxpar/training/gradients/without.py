"""Ops that have no gradient, with the reason for the error message."""

from onnxpar.graph.attribute_weights import ML
from onnxpar.training.gradients.vjp import no_gradient

no_gradient("Unique", "the number of its results is data-dependent")
no_gradient("SwiGLU", "the loader writes it as Sigmoid and Mul, which have gradients")
no_gradient(
    "LinearAttention CausalConvWithState",
    "for training, the loader writes it as its function body, which has a gradient",
)
no_gradient("BitCast", "it reads the same bits as another type of number")
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
    "the slope of rounding is zero; train the model before it is quantized",
    carries=True,
)
no_gradient(
    "ArrayFeatureExtractor Binarizer CastMap CategoryMapper DictVectorizer FeatureVectorizer "
    "Imputer LabelEncoder LinearClassifier LinearRegressor Normalizer OneHotEncoder SVMClassifier "
    "SVMRegressor Scaler TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor ZipMap",
    "models of ai.onnx.ml are trained by the libraries that export them",
    ML,
    carries=True,
)
