"""Groups of parameters with their own learning rates and hyperparameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from onnxpar.base.errors import StrategyError
from onnxpar.training.gradients.trained import matching
from onnxpar.training.optimizer import Optimizer
from onnxpar.training.optimizers import make_optimizer

_SCALE = "lr_scale"
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True)
class Group:
    """The parameters whose names match a glob, and how a step updates them.

    text       the user's text, such as "*.embed*:lr_scale=0.1,weight_decay=0"
    glob       the glob of names
    lr_scale   factor of the step's learning rate
    optimizer  another optimizer, by name; None for the step's optimizer
    options    hyperparameters by name, in place of the optimizer's own
    """

    text: str
    glob: str
    lr_scale: float
    optimizer: str | None
    options: Mapping[str, float]

    @staticmethod
    def parse(text: str) -> Group:
        """Reads a group from text, GLOB:NAME=VALUE,... Errors: StrategyError."""
        glob, _, rest = text.rpartition(":")
        values = dict(_pair(part, text) for part in rest.split(","))
        scale, name = values.pop(_SCALE, "1"), values.pop("optimizer", None)
        numbers = {key: _number(value, text) for key, value in values.items()}
        lr_scale = _number(scale, text)
        if not glob or not 0 <= lr_scale < float("inf"):
            raise _wrong(text)
        return Group(text, glob, lr_scale, name, numbers)

    def rule(self, base: Optimizer) -> UpdateRule:
        """Returns how the parameters of this group are updated; `base` is the optimizer of the
        step. Errors: StrategyError."""
        if self.optimizer is not None:
            optimizer = make_optimizer(self.optimizer, **self.options)
            if optimizer is None:
                raise _wrong(self.text)
            return UpdateRule(optimizer, self.lr_scale)
        known = [f.name for f in fields(base)]
        for key in self.options:
            if key not in known:
                raise StrategyError(
                    f"--group {self.text}: the optimizer has no hyperparameter {key!r}; give "
                    f"{', '.join((_SCALE, *known))}"
                )
        return UpdateRule(replace(base, **self.options), self.lr_scale)


@dataclass(frozen=True)
class UpdateRule:
    """How a step updates a parameter: by `optimizer`, with `lr_scale` times the step's learning
    rate."""

    optimizer: Optimizer
    lr_scale: float = 1.0


def rules_of(
    optimizer: Optimizer,
    groups: Sequence[Group],
    names: Collection[str],
    undecayed: Collection[str],
) -> tuple[dict[str, UpdateRule], dict[str, list[str]]]:
    """Returns the update rule of each parameter, by name; and for the summary, by a text about a
    rule, the names of its parameters.

    optimizer  the optimizer of the step
    groups     the groups that the user gives
    names      the names of all parameters
    undecayed  parameters without weight decay, unless their group gives one

    Of the groups that match a parameter, only the last one applies. Errors: StrategyError for a
    group that matches no parameter.
    """
    of: dict[str, Group] = {}
    for group in groups:
        of |= dict.fromkeys(matching(group.glob, names, "--group"), group)
    rules: dict[str, UpdateRule] = {}
    told: dict[str, list[str]] = {}
    for name in names:
        chosen = of.get(name)
        rule = UpdateRule(optimizer) if chosen is None else chosen.rule(optimizer)
        what = [] if chosen is None else [f"--group {chosen.text}"]
        decides = chosen is not None and "weight_decay" in chosen.options
        if rule.optimizer.weight_decay and not decides:
            if name in undecayed:
                plain = replace(rule.optimizer, weight_decay=0.0)
                rule = replace(rule, optimizer=plain)
                what.append("weight_decay=0, biases and scales of normalizations")
            else:
                what.append(f"weight_decay={rule.optimizer.weight_decay:g}")
        rules[name] = rule
        if what:
            told.setdefault(", ".join(what), []).append(name)
    return rules, told


def _pair(part: str, text: str) -> tuple[str, str]:
    """Returns name and value from NAME=VALUE. `text` is the whole group, for the error
    StrategyError."""
    key, is_given, value = part.strip().partition("=")
    if not (key and is_given):
        raise _wrong(text)
    return key.strip().replace("-", "_"), value.strip()


def _number(value: str, text: str) -> float:
    """Returns a number, or a bool from "true" and "false". Errors: StrategyError."""
    try:
        return _FLAGS[value] if value in _FLAGS else float(value)
    except ValueError:
        raise _wrong(text) from None


def _wrong(text: str) -> StrategyError:
    """Returns the error for a group that cannot be read."""
    return StrategyError(
        f"--group {text!r}: write a glob, a colon, and numbers by name, such as "
        "'*.bias:lr_scale=2,weight_decay=0'"
    )
