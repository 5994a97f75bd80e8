"""onnxpar, the sharding compiler for ONNX: splits a model over ranks that each run a stock
onnxruntime.

plan = onnxpar.shard("gpt2.onnx", "gpt2.par", devices=4, preset="tensor-parallel")
session = onnxpar.InferenceSession("gpt2.par")
logits, = session.run(["logits"], feeds)
"""

from onnxpar import interrupts as _interrupts  # noqa: F401  (first, as the rest takes a second)
from onnxpar.api import annotate as annotate
from onnxpar.api import candidates as candidates
from onnxpar.api import check as check
from onnxpar.api import compare_trace as compare_trace
from onnxpar.api import inspect as inspect
from onnxpar.api import make_plan as plan
from onnxpar.api import ops as ops
from onnxpar.api import opt as opt
from onnxpar.api import shard as shard
from onnxpar.calibration.command import calibrate as calibrate
from onnxpar.errors import InputError as InputError
from onnxpar.errors import ModelError as ModelError
from onnxpar.errors import OnnxparError as OnnxparError
from onnxpar.errors import RankError as RankError
from onnxpar.errors import StrategyError as StrategyError
from onnxpar.layout import Layout as Layout
from onnxpar.mesh import Mesh as Mesh
from onnxpar.plan import Plan as Plan
from onnxpar.plan_options import LayoutOptions as LayoutOptions
from onnxpar.plan_options import PlanOptions as PlanOptions
from onnxpar.runtime.session import InferenceSession as InferenceSession
from onnxpar.strategy import Strategy as Strategy
from onnxpar.topology import Topology as Topology
from onnxpar.version import version_of

__version__ = version_of("onnxpar")

__all__ = [
    "InferenceSession",
    "InputError",
    "Layout",
    "LayoutOptions",
    "Mesh",
    "ModelError",
    "OnnxparError",
    "Plan",
    "PlanOptions",
    "RankError",
    "Strategy",
    "StrategyError",
    "Topology",
    "annotate",
    "calibrate",
    "candidates",
    "check",
    "compare_trace",
    "inspect",
    "ops",
    "opt",
    "plan",
    "shard",
]
