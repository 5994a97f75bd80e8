"""The option --place: finds the tables that stay in files on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.interchange import type_text
from onnxpar.graph.metadata import node_names
from onnxpar.graph.subgraphs import all_nodes, constants
from onnxpar.graph.training_spec import Step
from onnxpar.load.load import Model
from onnxpar.runtime.session.values import is_value
from onnxpar.strategy.mindspore_keys import PRIMITIVE_TARGET
from onnxpar.strategy.named_ops import matching
from onnxpar.strategy.strategy import Strategy

HOST = "host"


def places_of(value: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Returns the places of tables by glob: ["emb*=host"] becomes {"emb*": "host"}; mappings stay.
    Errors: StrategyError for text of another form."""
    if isinstance(value, Mapping):
        return {str(pattern): str(place) for pattern, place in value.items()}
    places = {}
    for text in value:
        pattern, _, place = text.rpartition("=")
        if not pattern:
            raise StrategyError(f"--place {text}: write TABLE={HOST}")
        places[pattern] = place
    return places


def tables_on_host(
    model: Model, place: Mapping[str, str], strategy: Strategy | None
) -> tuple[str, ...]:
    """Returns the names of the weights and states that stay on the host: the user's tables, their
    optimizer states, and the results that replace these states. Errors: StrategyError for a glob
    that matches nothing, and for a tensor if a run reads or changes all its rows."""
    requests = [("--place", place)]
    if strategy is not None:
        requests.append((f"{strategy.source}: place", strategy.place))
    texts: dict[str, str] = {}
    for source, places in requests:
        for pattern, where in places.items():
            if where != HOST:
                raise StrategyError(
                    f"{source} {pattern}={where}: give {HOST}, or leave it out for a table in the "
                    "memory of its rank"
                )
            sources = _sources(model)
            tables = [n for n, t in sources.items() if any(_is_lookup(r, t) for r in t.outputs)]
            names = [pattern] if pattern in sources else matching(pattern, tables, "table", source)
            texts |= dict.fromkeys(names, f"{source} {pattern}={where}")
    texts |= _targeted(model.graph, strategy)
    texts = _with_slots(texts, model.step)
    for name, text in texts.items():
        _check(model, name, text)
        if any(is_value(type_text(t)) for t in (*model.graph.inputs, *model.graph.outputs)):
            raise StrategyError(f"{text}: the model has ports that are not tensors of numbers")
    outputs = {t.name: t for t in model.graph.outputs}
    after = [outputs[output] for state, output in model.states if state in texts]
    return (*texts, *(name for tensor in after for name in _written(tensor)))


def _written(output: gs.Variable) -> Iterator[str]:
    """Yields the name of an output; if Identity nodes copy it from a ScatterND, also the names
    before them."""
    yield output.name
    node = output.inputs[0]
    if node.op == "Identity":
        yield from _written(node.inputs[0])


def _sources(model: Model) -> dict[str, gs.Tensor]:
    """Returns the weights and states of a model, by name."""
    states = dict(model.states)
    inputs = [t for t in model.graph.inputs if t.name in states]
    return {t.name: t for t in (*inputs, *constants(model.graph))}


def _targeted(graph: gs.Graph, strategy: Strategy | None) -> dict[str, str]:
    """Returns the tables of lookups that a strategy places by MindSpore's attribute
    primitive_target, each with the text of the entry. Errors: StrategyError if an entry matches no
    lookup."""
    tables: dict[str, str] = {}
    for pattern, entry in strategy.shard.items() if strategy is not None else ():
        if not isinstance(entry, Mapping) or PRIMITIVE_TARGET not in entry:
            continue
        text = f"{pattern}: {PRIMITIVE_TARGET}={entry[PRIMITIVE_TARGET]!r}"
        lookups = [node for node in all_nodes(graph) if _is_lookup(node, node.inputs[0])]
        names = [
            node.inputs[0].name
            for node in lookups
            if any(fnmatchcase(n, str(pattern)) for n in (*node_names(node), node.inputs[0].name))
        ]
        if not names:
            raise StrategyError(
                f"{text} is for a Gather that looks up rows of a table; leave it out here"
            )
        tables |= dict.fromkeys(names, text)
    return tables


def _is_lookup(node: gs.Node, table: gs.Tensor) -> bool:
    """True if the node is a Gather of rows of `table`, a weight or graph input."""
    if node.op != "Gather" or table.inputs or not table.shape or node.inputs[1] is table:
        return False
    return node.inputs[0] is table and int(node.attrs.get("axis", 0)) in (0, -len(table.shape))


def _with_slots(texts: Mapping[str, str], step: Step | None) -> dict[str, str]:
    """Returns `texts` (texts for errors, by table) with entries for the optimizer states of each
    table, and for the table of each such state."""
    of = {slot.input: slot.of for slot in (step.slots if step is not None else ()) if slot.of}
    of_tables = {of.get(name, name): text for name, text in texts.items()}
    return {
        **of_tables,
        **{name: of_tables[table] for name, table in of.items() if table in of_tables},
    }


def _check(model: Model, name: str, text: str) -> None:
    """Raises StrategyError if a run reads or changes all rows of the weight or state `name`; `text`
    begins the message."""
    table, step = _sources(model)[name], model.step
    is_state = name in dict(model.states)
    if is_state:
        slot = next((s for s in step.slots if s.input == name), None) if step else None
        if step is None or slot is None:
            raise StrategyError(f"{text}: {name} is a state that each run replaces; leave it out")
        if slot.of in step.sampled or slot.of not in step.rows:
            why = (
                "a step draws its rows from all of its classes, which must be in memory; leave it "
                "out: --preset class-parallel splits the classes over the ranks"
                if slot.of in step.sampled
                else "each step changes all its rows; write the step with `onnxpar grad --lazy "
                f"'{slot.of or name}'`, or leave it out"
            )
            raise StrategyError(f"{text}: {name}: {why}")
    for node in table.outputs:
        is_update = is_state and node.op == "ScatterND" and node.inputs[0] is table
        if not (is_update or _is_lookup(node, table)):
            raise StrategyError(
                f"{text}: {node.op} '{node.name}' reads all of {name}; only tables of which "
                "nodes look up rows can be there, so leave it out"
            )
