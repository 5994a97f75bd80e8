"""Sessions, trainers and servers whose ranks are actors of a Ray cluster; needs the package `ray`
(pip install 'onnxpar[ray]').

import onnxpar.ray

with onnxpar.ray.InferenceSession("model.par", actors=onnxpar.ray.Actors(cpus=4)) as session:
    (logits,) = session.run(["logits"], feeds)
"""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    from onnxpar.base.errors import OnnxparError

    raise OnnxparError("onnxpar.ray needs the package ray: pip install 'onnxpar[ray]'") from None

from onnxpar.ray.actors import Actors
from onnxpar.ray.serving import serve
from onnxpar.ray.session import InferenceSession
from onnxpar.ray.trainer import Trainer

__all__ = ["Actors", "InferenceSession", "Trainer", "serve"]
