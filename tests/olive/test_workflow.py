"""Workflows of Olive that shard a model, and evaluate it on its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import onnxpar
from onnxpar.base.errors import ModelError, RankError
from onnxpar.planner.convert_options import options_of
from onnxpar.planner.option_entry import table
from onnxpar.planner.option_table import PlanOptions

pytest.importorskip("olive.passes")

from olive.evaluator.olive_evaluator import OliveEvaluatorConfig
from olive.model import DistributedOnnxModelHandler, ModelConfig, ONNXModelHandler
from olive.passes.olive_pass import create_pass_from_dict

from onnxpar.olive import ShardModel
from onnxpar.olive.pass_options import options, parameters

LLAMA = Path(__file__).parents[2] / "models/llama.dynamo.static.onnx"
IDS = np.random.default_rng(0).integers(0, 48, (4, 16))
FEEDS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
SHARDED = {"devices": 2, "preset": "tensor-parallel", "for_any_host": True}

TOKENS = """
import numpy as np
from olive.data.registry import Registry

import onnxpar.olive  # registers ShardedModelEvaluator

@Registry.register_dataset()
def tokens(**options):
    rows = np.random.default_rng(0).integers(0, 48, (8, 16))
    return [({"input_ids": row, "attention_mask": np.ones_like(row)}, row) for row in rows]
"""
METRICS: list[dict[str, Any]] = [
    {
        "name": "quality",
        "type": "accuracy",
        "data_config": "tokens",
        "sub_types": [{"name": "perplexity", "priority": 1, "higher_is_better": False}],
    },
    {
        "name": "speed",
        "type": "latency",
        "data_config": "tokens",
        "sub_types": [{"name": "avg", "priority": 2, "metric_config": {"repeat_test_num": 2}}],
    },
    {"name": "size", "type": "size_on_disk", "sub_types": [{"name": "bytes", "priority": 3}]},
]
WORKFLOW = {
    "input_model": {"type": "ONNXModel", "model_path": str(LLAMA)},
    "data_configs": [
        {
            "name": "tokens",
            "user_script": "tokens.py",
            "load_dataset_config": {"type": "tokens"},
            "dataloader_config": {"batch_size": 4},
        }
    ],
    "passes": {"shard": {"type": "ShardModel", **SHARDED}},
    "evaluators": {
        "ranks": {"type": "ShardedModelEvaluator", "user_script": "tokens.py", "metrics": METRICS}
    },
    "evaluator": "ranks",
    "evaluate_input_model": True,
    "output_dir": "out",
    "cache_dir": "cache",
}
RANK = """
import sys
import numpy as np
import onnxruntime as ort
file, library, given, made = sys.argv[1:]
options = ort.SessionOptions()
options.register_custom_ops_library(library)
session = ort.InferenceSession(file, options)
np.save(made, session.run(None, dict(np.load(given)))[0])
"""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLIVE_DISABLE_TELEMETRY", "1")  # which is sent over the network


def wanted() -> np.ndarray:
    (logits,) = ort.InferenceSession(LLAMA).run(None, FEEDS)
    return np.asarray(logits)


def sharded(folder: Path, **more: Any) -> Any:
    """What the pass makes of the model, as it comes back from a workflow's cache."""
    made = create_pass_from_dict(ShardModel, {**SHARDED, **more}, disable_search=True).run(
        ONNXModelHandler(str(LLAMA)), str(folder)
    )
    return ModelConfig.from_json(made.to_json()).create_model()


def values(metrics: Path) -> dict[str, float]:
    return {name: each["value"] for name, each in json.loads(metrics.read_text()).items()}


def test_a_workflow_shards_and_evaluates(tmp_path: Path) -> None:
    (tmp_path / "tokens.py").write_text(TOKENS)
    (tmp_path / "workflow.json").write_text(json.dumps(WORKFLOW))
    python = (sys.executable, "-m")
    known = subprocess.run([*python, "onnxpar.olive"], capture_output=True, check=True, text=True)
    (tmp_path / "passes.json").write_text(known.stdout)
    command = ["olive", "run", "--config", "workflow.json", "--package-config", "passes.json"]
    ended = subprocess.run([*python, *command], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]

    before = values(tmp_path / "out/input_model_metrics.json")
    after = values(tmp_path / "out/metrics.json")
    assert after["quality-perplexity"] == pytest.approx(before["quality-perplexity"], rel=1e-6)
    folder = tmp_path / "out/model"
    assert after["size-bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert after["speed-avg"] > 0
    model = ModelConfig.from_json(json.loads((tmp_path / "out/model_config.json").read_text()))
    assert isinstance(model.create_model(), DistributedOnnxModelHandler)
    with onnxpar.InferenceSession(folder) as session:
        np.testing.assert_allclose(session.run(None, FEEDS)[0], wanted(), rtol=1e-5, atol=5e-6)


def test_a_handler_has_what_a_stock_runtime_needs(tmp_path: Path) -> None:
    model = sharded(tmp_path / "out")
    assert model.num_ranks == 2
    np.savez(tmp_path / "in.npz", **FEEDS)
    common = {"ONNXPAR_WORLD_SIZE": "2", "ONNXPAR_STORE": f"file:{tmp_path / 'store'}"}
    ranks = []
    for rank in range(model.num_ranks):
        files = [model.ranked_model_path(rank), model.inference_settings["custom_ops_library"]]
        files += [tmp_path / "in.npz", tmp_path / f"{rank}.npy"]
        environment = {**os.environ, **common, "ONNXPAR_RANK": str(rank)}
        ranks.append(subprocess.Popen([sys.executable, "-c", RANK, *files], env=environment))
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    given = np.concatenate([np.load(tmp_path / f"{rank}.npy") for rank in range(2)], axis=2)
    np.testing.assert_allclose(given, wanted(), rtol=1e-5, atol=5e-6)


def test_a_custom_metric_gets_the_inputs_and_outputs_of_the_unsplit_model(tmp_path: Path) -> None:
    sessions = []

    def difference(model: Any, device: Any, providers: Any) -> float:
        options = {"session_options": {"intra_op_num_threads": 1, "graph_optimization_level": 0}}
        sessions.append(model.prepare_session(options, device, providers))
        assert model.io_config["output_shapes"] == [[4, 16, 512]]
        assert model.io_config["input_types"] == ["int64", "int64"]
        return float(np.abs(sessions[0].run(None, FEEDS)[0] - wanted()).max())

    metric = {
        "name": "difference",
        "type": "custom",
        "sub_types": [{"name": "max", "priority": 1, "higher_is_better": False}],
        "user_config": {"evaluate_func": difference, "user_script": __file__},
    }
    config = OliveEvaluatorConfig(type="ShardedModelEvaluator", metrics=[metric])
    model = sharded(tmp_path / "out")
    result = config.create_evaluator(model).evaluate(
        model, config.metrics, execution_providers=["CPUExecutionProvider"]
    )
    assert result["difference-max"].value < 5e-6
    assert sessions[0].get_session_options().intra_op_num_threads == 1
    with pytest.raises(RankError):  # its ranks have ended
        sessions[0].run(None, FEEDS)


def test_parameters_are_the_options_of_shard() -> None:
    assert tuple(parameters()) == tuple(table(PlanOptions))
    defaults = {name: each.default_value for name, each in parameters().items()}
    given = options(defaults)
    defaults = {name: each.default for name, each in table(PlanOptions).items()}
    wanted = {name: [] if value == () else value for name, value in defaults.items()}
    assert given == {name: value for name, value in wanted.items() if value is not None}
    assert options_of({**given, "devices": 2}).devices == 2


def test_options_in_a_workflow_may_be_structures(tmp_path: Path) -> None:
    strategy = {"mesh": {"dp": 2}, "tensors": {"input_ids": ["dp", None]}}
    model = sharded(tmp_path / "out", devices=None, preset=None, strategy=strategy)
    plan = onnxpar.inspect(model.model_path)
    assert plan.data["mesh"] == [["dp", 2]]


def test_what_is_no_complete_onnx_model_is_refused(tmp_path: Path) -> None:
    shard = create_pass_from_dict(ShardModel, SHARDED, disable_search=True)
    with pytest.raises(ModelError, match="a str; put a pass such as OnnxConversion"):
        shard._run_for_config("model", shard.config, str(tmp_path / "out"))
    (tmp_path / "model.onnx").write_bytes(LLAMA.read_bytes())
    (tmp_path / "w.npz").write_bytes(b"")
    apart = ONNXModelHandler(
        str(tmp_path), onnx_file_name="model.onnx", external_initializers_file_name="w.npz"
    )
    with pytest.raises(ModelError, match=r"in w\.npz \(external_initializers_file_name\)"):
        shard.run(apart, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
