"""onnxpar, the sharding compiler for ONNX: splits a model over ranks that each run a stock
onnxruntime.

plan = onnxpar.shard("gpt2.onnx", "gpt2.par", devices=4, preset="tensor-parallel")
session = onnxpar.InferenceSession("gpt2.par")
logits, = session.run(["logits"], feeds)
"""

from onnxpar.api import annotate as annotate
from onnxpar.api import make_plan as plan
from onnxpar.api import shard as shard
from onnxpar.errors import InputError as InputError
from onnxpar.errors import ModelError as ModelError
from onnxpar.errors import OnnxparError as OnnxparError
from onnxpar.errors import RankError as RankError
from onnxpar.errors import StrategyError as StrategyError
from onnxpar.layout import Layout as Layout
from onnxpar.mesh import Mesh as Mesh
from onnxpar.plan import Plan as Plan
from onnxpar.runtime.session import InferenceSession as InferenceSession
from onnxpar.strategy import Strategy as Strategy

__all__ = [
    "InferenceSession",
    "InputError",
    "Layout",
    "Mesh",
    "ModelError",
    "OnnxparError",
    "Plan",
    "RankError",
    "Strategy",
    "StrategyError",
    "annotate",
    "plan",
    "shard",
]
