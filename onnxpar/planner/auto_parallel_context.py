"""Options under MindSpore's names: what each setting of `mindspore.set_auto_parallel_context` means
here.

A setting becomes options of onnxpar, or has no effect because it always holds in onnxpar, or is
refused with the reason and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.base.near_names import did_you_mean
from onnxpar.planner.dataset_strategy import DATA_PARALLEL, FULL_BATCH, counts_of
from onnxpar.search.search import AUTO, PROPAGATION
from onnxpar.strategy.manual import MANUAL

Settings = Mapping[str, Any]
"""All settings of the user, by MindSpore's name."""
Setting = Callable[[Any, Settings], Mapping[str, Any]]
"""Returns the options that follow from the value of one setting; its second argument has all
settings. Errors: StrategyError."""
STAND_ALONE, DATA, HYBRID = "stand_alone", "data_parallel", "hybrid_parallel"
SEMI_AUTO, AUTO_PARALLEL = "semi_auto_parallel", "auto_parallel"
_SEARCHES = {
    "recursive_programming": AUTO,
    "dynamic_programming": AUTO,
    "sharding_propagation": PROPAGATION,
}
_DEFAULT_SEARCH = "recursive_programming"
_PIPELINE = "onnxpar has no pipeline parallelism yet; use more ranks of the other kinds"


def auto_parallel_context(**settings: Any) -> dict[str, Any]:
    """Returns options of `onnxpar.shard`, `plan` and `check`, given settings of
    `mindspore.set_auto_parallel_context`.

        context = onnxpar.auto_parallel_context(device_num=8, parallel_mode="data_parallel")
        onnxpar.shard("step.onnx", **context)

    The section `context` of a strategy file takes the same settings. Errors: StrategyError for a
    setting that onnxpar cannot follow, with the reason; TypeError for an unknown name.
    """
    for name in settings:
        if name not in SETTINGS:
            raise TypeError(
                f"auto_parallel_context() has no setting {name!r}{did_you_mean(name, SETTINGS)}"
            )
    return options_of_context(settings)


def options_of_context(settings: Settings, source: str = "auto_parallel_context") -> dict[str, Any]:
    """Returns the options that follow from all settings. `source` says in errors where the settings
    are. Errors: StrategyError, also for an unknown name and for settings that contradict each
    other."""
    options: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in settings.items():
        if name not in SETTINGS:
            raise StrategyError(f"{source}: no setting {name!r}{did_you_mean(name, SETTINGS)}")
        try:
            new = SETTINGS[name](value, settings)
        except StrategyError as error:
            raise StrategyError(f"{source}: {name}={value!r}: {error}") from None
        for option, choice in new.items():
            if option in options and options[option] != choice:
                raise StrategyError(
                    f"{source}: {origin[option]} and {name} ask for different values of {option}: "
                    f"{options[option]!r} and {choice!r}; give one of them"
                )
            options[option], origin[option] = choice, name
    return options


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise StrategyError("give True or False")
    return value


def _holds(reason: str) -> Setting:
    """Returns the Setting for a flag that must be True, because onnxpar always works in this way;
    `reason` is the error for False."""

    def setting(value: Any, settings: Settings) -> Mapping[str, Any]:
        if not _flag(value):
            raise StrategyError(reason)
        return {}

    return setting


def _either(value: Any, settings: Settings) -> Mapping[str, Any]:
    """The Setting for a flag that makes no difference."""
    _flag(value)
    return {}


def _off(reason: str) -> Setting:
    """Returns the Setting for something that must stay off; `reason` is the error for any other
    value."""

    def setting(value: Any, settings: Settings) -> Mapping[str, Any]:
        if value not in (False, None, "", {}):
            raise StrategyError(reason)
        return {}

    return setting


def _only(known: Any, reason: str) -> Setting:
    """Returns the Setting for which `known` is the only possible value; `reason` is the error for
    others."""

    def setting(value: Any, settings: Settings) -> Mapping[str, Any]:
        if value != known or type(value) is not type(known):
            raise StrategyError(reason)
        return {}

    return setting


def _device_num(value: Any, settings: Settings) -> Mapping[str, Any]:
    if type(value) is not int or value < 1:
        raise StrategyError("give a whole number from 1")
    return {"devices": value}


def _parallel_mode(value: Any, settings: Settings) -> Mapping[str, Any]:
    """The setting `parallel_mode`: a preset or a kind of search. In MindSpore's semi-automatic
    mode, a node without a strategy is split by its batch; so this mode is the preset data-parallel.
    """
    modes: dict[str, Mapping[str, Any]] = {
        STAND_ALONE: {"devices": 1},
        DATA: {"preset": "data-parallel"},
        HYBRID: {"preset": MANUAL},
        SEMI_AUTO: {"preset": "data-parallel"},
        AUTO_PARALLEL: {"search": _SEARCHES.get(_search_mode_of(settings), AUTO)},
    }
    if value not in modes:
        raise StrategyError(f"give one of {', '.join(modes)}")
    return _optimizer_preset(settings) or modes[value]


def _search_mode_of(settings: Settings) -> str:
    return str(
        settings.get("search_mode", settings.get("auto_parallel_search_mode", _DEFAULT_SEARCH))
    )


def _search_mode(value: Any, settings: Settings) -> Mapping[str, Any]:
    """The setting `search_mode`: the kind of search, if `parallel_mode` is auto_parallel."""
    if value not in _SEARCHES:
        raise StrategyError(f"give one of {', '.join(_SEARCHES)}")
    if settings.get("parallel_mode") != AUTO_PARALLEL:
        raise StrategyError(f"this is for parallel_mode='{AUTO_PARALLEL}'; give that, too")
    return {"search": _SEARCHES[value]}


def _optimizer_preset(settings: Settings) -> Mapping[str, Any]:
    """Returns the ZeRO preset that a parallel optimizer means; empty without one. MindSpore splits
    the update in its data-parallel mode, and also the parameters in its semi-automatic mode."""
    if not any(settings.get(name) is True for name in _OPTIMIZERS):
        return {}
    mode, config = settings.get("parallel_mode"), settings.get("parallel_optimizer_config") or {}
    if mode == SEMI_AUTO:
        return {"preset": "zero3"}
    if mode == DATA:
        is_split = isinstance(config, Mapping) and config.get("gradient_accumulation_shard")
        return {"preset": "zero2" if is_split else "zero1"}
    return {}


_OPTIMIZERS = ("enable_parallel_optimizer", "parallel_optimizer")


def _parallel_optimizer(value: Any, settings: Settings) -> Mapping[str, Any]:
    if not _flag(value):
        return {}
    preset = _optimizer_preset(settings)
    if not preset:
        raise StrategyError(
            f"this is for parallel_mode='{DATA}' or '{SEMI_AUTO}'. A search decides by itself "
            "where to split parameters and optimizer states; --memory-limit makes it do so"
        )
    return preset


def _parallel_optimizer_config(value: Any, settings: Settings) -> Mapping[str, Any]:
    """Checks the setting `parallel_optimizer_config`; `_optimizer_preset` uses it."""
    if not isinstance(value, Mapping):
        raise StrategyError("give a mapping")
    for key, entry in value.items():
        if key == "gradient_accumulation_shard":
            _flag(entry)
        elif key != "parallel_optimizer_threshold" or entry != 0:
            raise StrategyError(
                f"{key}={entry!r} has no counterpart: the ZeRO presets split every parameter; for "
                "exceptions, give these a layout under `tensors` of a strategy file"
            )
    return {}


def _comm_fusion(value: Any, settings: Settings) -> Mapping[str, Any]:
    """The setting `comm_fusion`: fusion of collectives by size or by index, which here must be the
    same for all-reduces, all-gathers and reduce-scatters."""
    if not isinstance(value, Mapping):
        raise StrategyError("give a mapping, such as {'allreduce': {'mode': 'size', 'config': 32}}")
    kinds = ("allreduce", "allgather", "reducescatter")
    options: dict[str, Any] = {}
    for key, entry in value.items():
        if key == "openstate":
            if not _flag(entry):
                return {"fusion": "none"}
        elif key not in kinds or not isinstance(entry, Mapping):
            raise StrategyError(f"{key!r}: give mappings for openstate, {', '.join(kinds)}")
        else:
            fusion = _fusion(key, entry)
            if options and fusion != options:
                raise StrategyError("one mode and size is for all kinds; give the same for each")
            options = fusion
    return options


def _fusion(kind: str, entry: Settings) -> dict[str, Any]:
    mode, config = entry.get("mode"), entry.get("config")
    if mode == "auto" and config is None:
        return {"fusion": "size"}
    if mode == "size" and isinstance(config, (int, float)) and config > 0:
        return {"fusion": "size", "bucket_mb": float(config)}
    if mode == "index" and kind == "allreduce":
        return {**_all_reduce_fusion_config(config, entry)}
    raise StrategyError(
        f"{kind}: give mode 'auto' with config None, 'size' with a number of MB, or (allreduce "
        "only) 'index' with a list of indices"
    )


def _are_indices(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(type(i) is int and i > 0 for i in value)
        and list(value) == sorted(set(value))
    )


def _all_reduce_fusion_config(value: Any, settings: Settings) -> Mapping[str, Any]:
    if not _are_indices(value):
        raise StrategyError("give a list of rising indices of gradients, such as [20, 35]")
    return {"fusion": f"index:{','.join(map(str, value))}"}


def _full_batch(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"dataset_strategy": FULL_BATCH if _flag(value) else DATA_PARALLEL}


def _dataset_strategy(value: Any, settings: Settings) -> Mapping[str, Any]:
    """The setting `dataset_strategy`: the layouts of the data inputs, as in the option of that
    name."""
    if value in (FULL_BATCH, DATA_PARALLEL):
        return {"dataset_strategy": value}
    counts = counts_of(value)
    if counts is None:
        raise StrategyError(
            f"give '{DATA_PARALLEL}', '{FULL_BATCH}', or for each data input the number of shards "
            "of each dimension, such as ((8, 1), (8,))"
        )
    return {"dataset_strategy": [list(numbers) for numbers in counts]}


def _load_file(value: Any, settings: Settings) -> Mapping[str, Any]:
    if value in ("", None):
        return {}
    if not str(value).endswith((".yaml", ".yml")):
        raise StrategyError(
            "MindSpore's own files name operators of its networks. Give a strategy file of "
            "onnxpar, in YAML, whose entries may have MindSpore's form"
        )
    return {"strategy": value}


def _save_file(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {} if value in ("", None) else {"save_strategy": value}


def _strategy_ckpt_config(value: Any, settings: Settings) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise StrategyError("give a mapping with load_file and save_file")
    for key, entry in value.items():
        if key not in ("load_file", "save_file") and (key, entry) != (
            "only_trainable_params",
            True,
        ):
            raise StrategyError(f"{key}={entry!r} has no counterpart; give load_file and save_file")
    return {
        **_load_file(value.get("load_file"), settings),
        **_save_file(value.get("save_file"), settings),
    }


_ACCUMULATE = "micro-batches are part of the step: give `onnxpar grad --accumulate N`"
_SUM = (
    "the gradients are those of the loss that the step has, over the whole batch, on any number of "
    "ranks; with a loss that is a mean they are means. For the sum of the ranks' gradients, "
    "multiply the learning rate by the number of ranks that share the batch"
)
_RANK = "the launcher gives each process its rank; leave this out"

SETTINGS: Mapping[str, Setting] = {
    "device_num": _device_num,
    "global_rank": _off(_RANK),
    "parallel_mode": _parallel_mode,
    "search_mode": _search_mode,
    "auto_parallel_search_mode": _search_mode,
    "gradients_mean": _holds(_SUM),
    "gradient_fp32_sync": _holds(
        "the ranks add gradients up in the parameters' dtype; to send fewer bytes, give "
        "--compression float16"
    ),
    "force_fp32_communication": _off(
        "activations are communicated in the dtype in which they are computed; gradients in that "
        "of the parameters"
    ),
    "loss_repeated_mean": _holds(
        "nodes that every rank repeats count once in the gradients, so there is nothing to divide"
    ),
    "parameter_broadcast": _either,
    "enable_parallel_optimizer": _parallel_optimizer,
    "parallel_optimizer": _parallel_optimizer,
    "parallel_optimizer_config": _parallel_optimizer_config,
    "enable_alltoall": _holds(
        "onnxpar takes the cheapest collectives between two layouts, all-to-all among them"
    ),
    "all_reduce_fusion_config": _all_reduce_fusion_config,
    "comm_fusion": _comm_fusion,
    "full_batch": _full_batch,
    "dataset_strategy": _dataset_strategy,
    "strategy_ckpt_load_file": _load_file,
    "strategy_ckpt_save_file": _save_file,
    "strategy_ckpt_config": _strategy_ckpt_config,
    "grad_accumulation_step": _only(1, _ACCUMULATE),
    "pipeline_stages": _only(1, _PIPELINE),
    "pipeline_config": _off(_PIPELINE),
    "pipeline_result_broadcast": _off(_PIPELINE),
    "auto_pipeline": _off(_PIPELINE),
    "group_ckpt_save_file": _off("plan.json has the group of each collective; leave this out"),
    "dump_local_norm": _off("`onnxpar grad --clip-norm` returns the norm of all gradients"),
    "dump_local_norm_path": _off("the norm of all gradients is in log/metrics.jsonl"),
    "dump_device_local_norm": _off("`onnxpar grad --clip-norm` returns the norm of all gradients"),
}
"""The setting behind each name of `mindspore.set_auto_parallel_context`. `parameter_broadcast` has
no effect: the ranks read their shards of one model."""
