"""The pass ShardModel of Olive workflows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olive.model import DistributedOnnxModelHandler, ONNXModelHandler
from olive.passes import Pass

from onnxpar.api import shard
from onnxpar.base.errors import ModelError
from onnxpar.olive.pass_options import options, parameters
from onnxpar.runtime.ranks.library import library_path

RANK_FILE = "rank_{:04d}.onnx"
"""The name of a rank's graph in a sharded model."""
LIBRARY = "custom_ops_library"
"""The inference setting with the path of the plugin, for
`onnxruntime.SessionOptions.register_custom_ops_library`."""


class ShardModel(Pass):  # type: ignore[misc]
    """A pass that shards an ONNX model. Its parameters are the options of `onnxpar.shard`; its
    result is a DistributedOnnxModel in a folder that `onnxpar.InferenceSession` and `onnxpar run`
    take, too.

    It must be the last pass of a workflow: other passes would change the file of each rank by
    itself.
    """

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, Any]:
        return parameters()

    def _run_for_config(self, model: Any, config: Any, output_model_path: str) -> Any:
        """Writes the sharded model to the folder `output_model_path`, and returns its handler.
        Errors: OnnxparError if the model cannot be sharded."""
        _check(model)
        folder = Path(output_model_path)
        plan = shard(model.model_path, folder, **options(config.model_dump()))
        return DistributedOnnxModelHandler(
            model_path=str(folder),
            model_name_pattern=RANK_FILE,
            num_ranks=plan.mesh.size,
            inference_settings={**(model.inference_settings or {}), LIBRARY: str(library_path())},
            use_ort_extensions=model.use_ort_extensions,
        )


def _check(model: Any) -> None:
    """Errors: ModelError unless the model is an ONNX file with all of its weights."""
    if not isinstance(model, ONNXModelHandler):
        raise ModelError(
            f"ShardModel shards ONNX models, and this is a {type(model).__name__}; put a pass such "
            "as OnnxConversion before it"
        )
    for name in ("external_initializers_file_name", "constant_inputs_file_name"):
        if getattr(model, name):
            raise ModelError(
                f"ShardModel: some weights of {model.model_path} are in {getattr(model, name)} "
                f"({name}), which Olive gives to a session when it starts; leave out the pass that "
                "moved them there"
            )
