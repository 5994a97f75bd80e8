"""A pass and an evaluator for workflows of Olive, Microsoft's optimizer of ONNX models (`pip
install 'onnxpar[olive]'`):

ShardModel             shards the ONNX model of a workflow, by the options of `onnxpar.shard`
ShardedModelEvaluator  Olive's metrics for a sharded model, measured on all its ranks
package_config         the passes of Olive and this one, for `olive run --package-config`
"""

try:
    import olive.passes  # noqa: F401
except ImportError as error:
    raise ImportError("onnxpar.olive needs Olive: pip install 'onnxpar[olive]'") from error

from onnxpar.olive.evaluator import ShardedModelEvaluator
from onnxpar.olive.package_config import package_config
from onnxpar.olive.shard_model import ShardModel

__all__ = ["ShardModel", "ShardedModelEvaluator", "package_config"]
