"""Imports point one way, passes do not import each other, rules know no mesh."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    (
        "arrays",
        "errors",
        "exported",
        "interrupts",
        "own_folder",
        "lookup",
        "progress_line",
        "origin",
        "packing",
        "typed_bytes",
        "symbols",
        "quantities",
        "plain_yaml",
        "shown",
        "trace",
        "version",
        "digests",
        "write_file",
        "new_folder",
        "folder_lock",
    ),
    ("fits", "quotients", "ties"),
    ("mesh", "rank_table", "topology"),
    ("layout", "annotations", "device_lists"),
    ("rules.rule",),
    ("narrow", "stored", "untie", "tolerated", "upgrade", "interchange", "scopes", "step"),
    (
        "branches",
        "runtime_shapes",
        "table_reads",
        "unfuse",
        "sequences",
        "shapes",
        "checker",
        "functions",
        "inference",
        "misfits",
        "input_sizes",
        "model",
        "state_pairs",
        "subgraphs",
        "collective_shapes",
        "collective",
        "equal_sizes",
        "branch_sizes",
        "lockstep",
        "cache_sizes",
        "typical",
        "open_sizes",
        "write_model",
        "clone",
        "fused_units",
        "gates",
        "repetitions",
    ),
    ("bonds", "factors", "sized_factors", "pieces", "rules", "accumulators"),
    (
        "sharding",
        "rows",
        "search.cost",
        "plan",
        "lower_reshard",
        "lower_bucket",
        "unsigned_pairs",
        "ranges",
        "weights",
        "open_constants",
        "size_graph",
    ),
    (
        "standard_shardings",
        "dimension_text",
        "write_strategy",
        "placements",
        "reshard",
        "pending",
        "strategy",
        "derived_seeds",
        "annotated_strategy",
        "asked",
        "manual",
        "rank_shapes",
        "handwritten",
    ),
    ("flops", "schedule", "buckets", "compression", "threshold_codes"),
    ("search",),
    ("grad",),
    ("training",),
    ("passes",),
    ("summary", "text", "verify", "write_annotations"),
    ("replay", "open_ports", "reckoning", "search.save", "expose"),
    ("memory_limit", "host_memory", "pass_order", "plugins"),
    ("pipeline", "unused_options", "typed_json", "dump"),
    ("candidates", "explain"),
    (
        "pass_list",
        "report",
        "op_table",
        "arguments",
        "command_parser",
        "trace_lines",
        "comparison_lines",
        "candidate_lines",
        "charts",
        "report_page",
        "plan_options",
        "given_model",
        "named_passes",
    ),
    ("runtime",),
    (
        "training.__init__",
        "training.api",
        "training.checkpoint",
        "training.compare",
        "training.data",
        "training.loop",
        "training.merge",
        "training.picture",
        "training.rates",
        "training.replicas",
        "training.together",
        "training.trainer",
        "training.write_checkpoint",
    ),
    ("calibration",),
    ("checking",),
    ("api", "commands", "training_commands", "hvd"),
    ("error_line",),
    ("cli",),
)
"""From the lowest; a module imports from its own layer or below."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package by its name below onnxpar."""
    for file in sorted((ROOT / "onnxpar").rglob("*.py")):
        yield ".".join(file.relative_to(ROOT / "onnxpar").with_suffix("").parts), file
    for file in sorted((ROOT / "passes").glob("*.py")):
        yield f"passes.{file.stem}", file


def imports(file: Path) -> Iterator[str]:
    """The onnxpar modules that a file imports at run time, by name below onnxpar."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onnxpar"):
            base = (node.module or "").removeprefix("onnxpar").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                path = ROOT / "onnxpar" / Path(*inner.split("."))
                is_module = path.with_suffix(".py").exists() or path.is_dir()
                yield inner if is_module else base


def layer(module: str) -> int:
    """The number of a module's layer: that of its longest listed prefix."""
    found = [
        (len(name), i)
        for i, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    assert found, f"{module} stands in no layer; add it to LAYERS"
    return max(found)[1]


OTHERS = ("__init__", "__main__")


@pytest.mark.parametrize("module,file", [m for m in modules() if m[0] not in OTHERS])
def test_imports_point_down(module: str, file: Path) -> None:
    for name in imports(file):
        assert layer(name) <= layer(module), f"{module} imports {name}, which stands above it"


def test_passes_do_not_import_each_other() -> None:
    for module, file in modules():
        if module.startswith("passes.") and module != "passes.pass_":
            others = {n for n in imports(file) if n.startswith("passes.")} - {"passes.pass_"}
            assert not others, f"{module} imports {others}"


MACHINERY = ("rules.local", "rules.lowering", "rules.halo", "rules.oracle")


def test_rules_know_no_mesh() -> None:
    for module, file in modules():
        if module.startswith("rules.") and module not in MACHINERY:
            assert "mesh" not in set(imports(file)), module


BELOW = {
    "arrays",
    "digests",
    "errors",
    "interrupts",
    "layout",
    "lookup",
    "mesh",
    "origin",
    "own_folder",
    "packing",
    "typed_bytes",
    "runtime",
    "step",
    "symbols",
    "trace",
    "write_file",
}


def test_the_runtime_knows_no_passes() -> None:
    for module, file in modules():
        if module.startswith("runtime."):
            known = {n.split(".")[0] for n in imports(file)}
            assert known <= BELOW, (module, known)


def test_runtime_follows_the_plan_format() -> None:
    from onnxpar.plan import FORMAT, STORED
    from onnxpar.runtime import bundle, first_states

    assert (FORMAT, STORED) == (bundle.FORMAT, first_states.STORED)
