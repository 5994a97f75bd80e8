"""Training over ranks between which whole shards move, forward and backward."""

from __future__ import annotations

from pathlib import Path

from training.steps import check_training, write_step

TEXT = """grid (double[7,5] x, double[7,5] w1, double[7,5] w2) => (double[7,5] y)
{ a = Mul(x, w1)  t = Tanh(a)  b = Mul(t, w2)  y = Sigmoid(b) }"""


def test_shards_move_there_and_back(tmp_path: Path) -> None:
    """The activation moves to the ranks of the next layer, its gradient back."""
    shard = {
        "Mul_a": [["a", "b"], ["a", "b"]],
        "Tanh_t": [["a", "b"]],
        "Mul_b": [["b", "a"], ["b", "a"]],
        "Sigmoid_y": [["b", "a"]],
    }
    step = write_step(TEXT, tmp_path, loss="mse", optimizer="adam")
    plan = check_training(step, "a=2,b=2", 5, strategy={"shard": shard})
    moved = [c for c in plan.collectives if c.kind == "CollectivePermute"]
    assert {(c.before, c.after) for c in moved} == {
        ("[a, b]", "[b, a]"),
        ("[b, a]", "[a, b]"),
    }
    assert {c.bytes for c in moved} == {4 * 3 * 8}
