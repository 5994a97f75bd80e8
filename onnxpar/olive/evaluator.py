"""Evaluates sharded models in an Olive workflow."""

from __future__ import annotations

from typing import Any

from olive.evaluator.olive_evaluator import OnnxEvaluator
from olive.evaluator.registry import Registry
from olive.model import DistributedOnnxModelHandler

from onnxpar.olive.whole_model import WholeModelHandler


@Registry.register("ShardedModelEvaluator")
class ShardedModelEvaluator(OnnxEvaluator):  # type: ignore[misc]
    """Olive's evaluator of ONNX models, which also evaluates sharded models that ShardModel has
    written: on all ranks, with the inputs and outputs of the unsplit model. Functions of a custom
    metric get a handler whose `prepare_session` returns a session of all ranks, too."""

    def evaluate(self, model: Any, metrics: Any, *args: Any, **options: Any) -> Any:
        """Returns the results of the metrics. Errors: OnnxparError for a sharded model that is
        damaged, or whose run fails; errors of Olive."""
        if not isinstance(model, DistributedOnnxModelHandler):
            return super().evaluate(model, metrics, *args, **options)
        whole = WholeModelHandler(model)
        try:
            return super().evaluate(whole, metrics, *args, **options)
        finally:
            whole.close()
