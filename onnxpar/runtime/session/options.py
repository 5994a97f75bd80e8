"""onnxruntime's session and run options as plain data that can be sent to every rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar.base.custom_ops import libraries
from onnxpar.runtime.ranks.cores import BINDINGS

CACHE = 256 << 20
"""Default of the most bytes of table rows (of tables on the host) that a rank keeps in memory."""
_ENUMS: Mapping[str, Any] = {
    "execution_mode": ort.ExecutionMode,
    "execution_order": getattr(ort, "ExecutionOrder", int),
    "graph_optimization_level": ort.GraphOptimizationLevel,
}
_SESSION_FIELDS = (
    *_ENUMS,
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "enable_profiling",
    "inter_op_num_threads",
    "intra_op_num_threads",
    "log_severity_level",
    "log_verbosity_level",
    "logid",
    "optimized_model_filepath",
    "profile_file_prefix",
    "use_deterministic_compute",
    "use_per_session_threads",
)
_FILE_FIELDS = ("optimized_model_filepath", "profile_file_prefix")
_RUN_FIELDS = (
    "log_severity_level",
    "log_verbosity_level",
    "logid",
    "only_execute_path_to_fetches",
)
# onnxruntime returns the value of a key, but cannot list the keys: these are all documented keys.
_SESSION_KEYS = (
    "ep.context_embed_mode",
    "ep.context_enable",
    "ep.context_file_path",
    "ep.context_model_external_initializers_file_name",
    "ep.context_node_name_prefix",
    "ep.dynamic.workload_type",
    "ep.share_ep_contexts",
    "ep.stop_share_ep_contexts",
    "mlas.disable_kleidiai",
    "mlas.enable_gemm_fastmath_arm64_bfloat16",
    "mlas.use_lut_gemm",
    "optimization.constant_folding_max_output_size_in_bytes",
    "optimization.disable_specified_optimizers",
    "optimization.enable_cast_chain_elimination",
    "optimization.enable_gelu_approximation",
    "optimization.enable_memory_optimizer",
    "optimization.enable_memory_probe_recompute_config",
    "optimization.minimal_build_optimizations",
    "session.allow_released_opsets_only",
    "session.collect_node_memory_stats_to_file",
    "session.debug_layout_transformation",
    "session.disable_aot_function_inlining",
    "session.disable_cpu_ep_fallback",
    "session.disable_double_qdq_remover",
    "session.disable_model_compile",
    "session.disable_prepacking",
    "session.disable_qdq_constant_folding",
    "session.disable_quant_qdq",
    "session.dynamic_block_base",
    "session.enable_dq_matmulnbits_fusion",
    "session.enable_quant_qdq",
    "session.enable_quant_qdq_cleanup",
    "session.fail_on_suboptimal_compiled_model",
    "session.force_spinning_stop",
    "session.function_expansion_byte_limit",
    "session.function_expansion_node_limit",
    "session.graph_optimizations_loop_level",
    "session.inter_op.allow_spinning",
    "session.inter_op.spin_backoff_max",
    "session.inter_op.spin_duration_us",
    "session.intra_op.allow_spinning",
    "session.intra_op.spin_backoff_max",
    "session.intra_op.spin_duration_us",
    "session.intra_op_thread_affinities",
    "session.load_model_format",
    "session.model_external_initializers_file_folder_path",
    "session.node_partition_config_file",
    "session.optimized_model_external_initializers_file_name",
    "session.optimized_model_external_initializers_min_size_in_bytes",
    "session.prepack.enable_parallel",
    "session.qdq_matmulnbits_accuracy_level",
    "session.qdq_matmulnbits_block_size",
    "session.qdqisint8allowed",
    "session.record_ep_graph_assignment_info",
    "session.save_external_prepacked_constant_initializers",
    "session.save_model_format",
    "session.set_denormal_as_zero",
    "session.strict_shape_type_inference",
    "session.use_device_allocator_for_initializers",
    "session.use_env_allocators",
    "session.use_ort_model_bytes_directly",
    "session.use_ort_model_bytes_for_initializers",
    "session.x64quantprecision",
)
_GRAPH = "gpu_graph_id"
_RUN_KEYS = (
    "disable_synchronize_execution_providers",
    _GRAPH,
    "memory.enable_memory_arena_shrinkage",
)
_SPINNING = "session.intra_op.allow_spinning"
_DISABLED = "optimization.disable_specified_optimizers"
SLOW_FUSIONS = ("SkipLayerNormFusion",)
"""Optimizers of onnxruntime that make float32 models slower on CPUs: SkipLayerNormalization takes
up to 6 times as long as the Add and the LayerNormalization that it replaces."""


@dataclass(frozen=True)
class SessionSpec:
    """The options of a rank's onnxruntime session, as data that can be sent to the rank: all but
    its model and its world.

    fields        attributes of `SessionOptions`, by name
    config        session config entries
    libraries, providers, provider_options, disabled_optimizers  as onnxruntime takes them
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    libraries: Sequence[str] = ()
    providers: Sequence[Any] | None = None
    provider_options: Sequence[Mapping[str, Any]] | None = None
    disabled_optimizers: Sequence[str] = ()
    profile: str = ""
    """A folder for onnxruntime's recordings; empty: nothing is recorded."""
    table_dir: str = ""
    """The folder for the files of tables on the host; empty: the folder of the sharded model."""
    table_cache: int = CACHE
    """Most bytes of table rows (of tables on the host) that a rank keeps in memory."""
    verify: bool = False
    """True if ranks first compare every byte that they read of the folder with its digests."""
    bind: str = BINDINGS[0]
    """What a rank is bound to: one of BINDINGS."""
    ranks_per_numa: int = 0
    """Ranks on each NUMA node; 0: each rank is on the node where it gets most cores."""
    replica: int = 0
    replicas: int = 1
    """How many sessions divide the cores of the host; this one is number `replica`, from 0."""

    @staticmethod
    def of(options: ort.SessionOptions | None, **others: Any) -> SessionSpec:
        """Returns a spec with the fields and config entries that are set in `options`; `others` are
        more fields of this class.

        Initializers, dimension overrides and custom-op libraries that were added to `options` are
        lost, because onnxruntime does not reveal them; pass the libraries again as `libraries`.
        Libraries that this process uses (`use_libraries`) are added.
        """
        own = others.pop("libraries", ())
        others["libraries"] = [*dict.fromkeys([*libraries(), *map(os.path.abspath, own)])]
        if options is None:
            return SessionSpec(**others)
        fields = {name: _plain(getattr(options, name)) for name in _present(options)}
        config = _entries(options.get_session_config_entry, _SESSION_KEYS)
        return SessionSpec(fields, {**config, **others.pop("config", {})}, **others)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SessionSpec:
        """Returns the spec from `data`, the result of `dataclasses.asdict` after a way through
        JSON."""
        providers = data["providers"]
        if providers is not None:
            providers = [tuple(p) if isinstance(p, list) else p for p in providers]
        return SessionSpec(**{**data, "providers": providers})

    def all_disabled(self) -> Sequence[str]:
        """Returns the optimizers to switch off: `disabled_optimizers` or, if it is empty, the
        optimizers that the config entry names, as in onnxruntime."""
        entry = self.config.get(_DISABLED, "")
        return self.disabled_optimizers or [name for name in entry.split(";") if name]

    def apply(self, options: ort.SessionOptions, rank: int, threads: int, spin: bool) -> None:
        """Sets these options on `options`; also the number of threads and whether they spin, unless
        the user has set that. The rank is added to the names of files that onnxruntime writes."""
        for name, value in self.fields.items():
            if name in _FILE_FIELDS and value:
                value = _ranked(value, rank)
            setattr(options, name, _ENUMS[name](value) if name in _ENUMS else value)
        if not options.intra_op_num_threads:
            options.intra_op_num_threads = threads
        if not spin and _SPINNING not in self.config:
            options.add_session_config_entry(_SPINNING, "0")
        for key, value in self.config.items():
            options.add_session_config_entry(key, value)
        for library in self.libraries:
            options.register_custom_ops_library(library)


def keep_double(
    options: ort.SessionOptions,
    inputs: Iterable[np.dtype[Any] | None],
    outputs: Iterable[np.dtype[Any] | None],
) -> bool:
    """Lowers the optimization level for a model that computes in float64, because onnxruntime's
    fusions are inexact there: fused norms use a different epsilon, and fused products a float32
    scale. A model computes in float64 if all its floating-point inputs (or outputs, if no input is
    floating-point) are float64. A level that is already lower stays. Returns True if it changed
    `options`."""
    floats, others = ({t for t in types if t and t.kind == "f"} for types in (inputs, outputs))
    if (floats or others) != {np.dtype(np.float64)}:
        return False
    level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    if int(options.graph_optimization_level) <= int(level):
        return False
    options.graph_optimization_level = level
    return True


def run_spec(options: ort.RunOptions | None) -> dict[str, Any] | None:
    """Returns the fields and config entries of run options as data for JSON; None if `options` is
    None."""
    if options is None:
        return None
    fields = {name: getattr(options, name) for name in _RUN_FIELDS}
    return {"fields": fields, "config": _entries(options.get_run_config_entry, _RUN_KEYS)}


def run_options(spec: Mapping[str, Any] | None) -> ort.RunOptions:
    """Returns onnxruntime's run options from a result of `run_spec`."""
    options = ort.RunOptions()
    # onnxruntime asks for this entry in each run with a binding; without one, it throws and catches
    # an exception, which takes longer than a small run.
    options.add_run_config_entry(_GRAPH, "0")
    if spec is None:
        return options
    for name, value in spec["fields"].items():
        setattr(options, name, value)
    for key, value in spec["config"].items():
        options.add_run_config_entry(key, value)
    return options


def _present(options: ort.SessionOptions) -> list[str]:
    """Returns the names of session fields that this version of onnxruntime has."""
    return [name for name in _SESSION_FIELDS if hasattr(options, name)]


def _plain(value: Any) -> Any:
    """The value of a field as JSON takes it: enums become ints."""
    return value if isinstance(value, str | bool | int) else int(value)


def _entries(get: Any, keys: Sequence[str]) -> dict[str, str]:
    """The config entries that are set, by key."""
    entries = {}
    for key in keys:
        try:
            entries[key] = get(key)
        except RuntimeError:  # raised if the key is not set
            continue
    return entries


def _ranked(path: str, rank: int) -> str:
    """Returns a path with the rank in the file's name: `a/model.onnx` becomes
    `a/model.rank3.onnx`."""
    folder, slash, name = path.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return folder + slash + (f"{stem}.rank{rank}{dot}{suffix}" if dot else f"{name}rank{rank}_")
