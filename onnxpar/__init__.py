"""onnxpar, the sharding compiler for ONNX: splits a model over ranks that each run a stock
onnxruntime.

plan = onnxpar.shard("gpt2.onnx", "gpt2.par", devices=4, preset="tensor-parallel")
session = onnxpar.InferenceSession("gpt2.par")
logits, = session.run(["logits"], feeds)

Rooms, in the order of the stages. A room imports only from rooms above it.

base      errors, arrays, units, text, interrupts; files that appear complete or not at all
equivalence  proves from files alone that ranks compute a model; imports only base
layout    meshes and layouts: the elements that each rank holds; closed forms of open sizes
graph     models and their graphs: protos, tensors, shapes, checks, state pairs, open sizes
runtime   ranks, sessions, traces, ranks on several hosts (native/ is the plugin)
load      from a file to the graph that all passes see: rewrites of what exporters write
cost      topologies, and the time of communication, memory traffic and compute; calibration
rules     sharding rules, one file per family of ops
sharding  factors of a whole graph, the state of their sharding, reshards between layouts
strategy  what users request: by file or annotation, by a preset, by hand
lowering  global nodes to a rank's nodes: local attributes, halos, collectives, weights
search    the strategy with the lowest cost
training  gradients, one file per family of ops; training steps as graphs: backward pass, optimizers
compiler  the pass interface, the plan, verification, text
passes    the passes, one per file
planner   options, attempts at a plan, the order and execution of passes, dumps
trainer   training runs: the loop, data, checkpoints
report    tables and pages for people; comparison of sharded results with unsplit ones
llm       language and embedding models: text in, text or vectors out
serve     language and embedding models over HTTP
api       the Python functions
ray       sessions, trainers and servers on the actors of a Ray cluster
hvd       Horovod's API
cli       the command line
olive     a pass and an evaluator for Olive
testing   oracles and proofs for people who write rules and gradients
"""

from onnxpar.base import interrupts as _interrupts  # noqa: F401  (first, as the rest takes a second)

# isort: split
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str

    from onnxpar.api import annotate as annotate
    from onnxpar.api import candidates as candidates
    from onnxpar.api import check as check
    from onnxpar.api import compare_trace as compare_trace
    from onnxpar.api import inspect as inspect
    from onnxpar.api import make_plan as plan
    from onnxpar.api import node_costs as node_costs
    from onnxpar.api import ops as ops
    from onnxpar.api import opt as opt
    from onnxpar.api import shard as shard
    from onnxpar.api import verify as verify
    from onnxpar.base.errors import InputError as InputError
    from onnxpar.base.errors import ModelError as ModelError
    from onnxpar.base.errors import OnnxparError as OnnxparError
    from onnxpar.base.errors import RankError as RankError
    from onnxpar.base.errors import StrategyError as StrategyError
    from onnxpar.base.pass_times import PassTimes as PassTimes
    from onnxpar.compiler.plan import Plan as Plan
    from onnxpar.cost.topology import Topology as Topology
    from onnxpar.equivalence.verification import Verification as Verification
    from onnxpar.layout.layout import Layout as Layout
    from onnxpar.layout.mesh import Mesh as Mesh
    from onnxpar.planner.auto_parallel_context import (
        auto_parallel_context as auto_parallel_context,
    )
    from onnxpar.planner.calibrate import calibrate as calibrate
    from onnxpar.planner.option_table import LayoutOptions as LayoutOptions
    from onnxpar.planner.option_table import PlanOptions as PlanOptions
    from onnxpar.runtime.session.session import InferenceSession as InferenceSession
    from onnxpar.strategy.strategy import Strategy as Strategy

__all__ = [
    "InferenceSession",
    "InputError",
    "Layout",
    "LayoutOptions",
    "Mesh",
    "ModelError",
    "OnnxparError",
    "PassTimes",
    "Plan",
    "PlanOptions",
    "RankError",
    "Strategy",
    "StrategyError",
    "Topology",
    "Verification",
    "annotate",
    "auto_parallel_context",
    "calibrate",
    "candidates",
    "check",
    "compare_trace",
    "inspect",
    "node_costs",
    "ops",
    "opt",
    "plan",
    "shard",
    "verify",
]

_HOMES = {
    "InferenceSession": "onnxpar.runtime.session.session:InferenceSession",
    "InputError": "onnxpar.base.errors:InputError",
    "Layout": "onnxpar.layout.layout:Layout",
    "LayoutOptions": "onnxpar.planner.option_table:LayoutOptions",
    "Mesh": "onnxpar.layout.mesh:Mesh",
    "ModelError": "onnxpar.base.errors:ModelError",
    "OnnxparError": "onnxpar.base.errors:OnnxparError",
    "PassTimes": "onnxpar.base.pass_times:PassTimes",
    "Plan": "onnxpar.compiler.plan:Plan",
    "PlanOptions": "onnxpar.planner.option_table:PlanOptions",
    "RankError": "onnxpar.base.errors:RankError",
    "Strategy": "onnxpar.strategy.strategy:Strategy",
    "StrategyError": "onnxpar.base.errors:StrategyError",
    "Topology": "onnxpar.cost.topology:Topology",
    "Verification": "onnxpar.equivalence.verification:Verification",
    "annotate": "onnxpar.api:annotate",
    "auto_parallel_context": "onnxpar.planner.auto_parallel_context:auto_parallel_context",
    "calibrate": "onnxpar.planner.calibrate:calibrate",
    "candidates": "onnxpar.api:candidates",
    "check": "onnxpar.api:check",
    "compare_trace": "onnxpar.api:compare_trace",
    "inspect": "onnxpar.api:inspect",
    "node_costs": "onnxpar.api:node_costs",
    "ops": "onnxpar.api:ops",
    "opt": "onnxpar.api:opt",
    "plan": "onnxpar.api:make_plan",
    "shard": "onnxpar.api:shard",
    "verify": "onnxpar.api:verify",
}
"""Where each public name is: it is imported when it is first used, so that a program that runs a
sharded model does not wait for the compiler."""

if not TYPE_CHECKING:  # a type checker should know all names

    def __getattr__(name: str) -> object:
        """Imports a public name, or a room, when it is first used."""
        if name in _HOMES:
            module, _, own = _HOMES[name].partition(":")
            value = getattr(_import_module(module), own)
        elif name == "__version__":  # importlib.metadata takes longer to import than all of this
            value = _import_module("onnxpar.base.version").version_of("onnxpar")
        elif not name.startswith("_") and _find_spec(f"{__name__}.{name}"):
            value = _import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
