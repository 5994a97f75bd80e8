"""The picture of a training run: its labels, and a run of one step."""

from __future__ import annotations

from typing import Any

import pytest

from onnxpar.trainer.loss_curve import FEW, figure_of


def drawn(steps: int, every: int = 0) -> Any:
    """The axes of a run of so many steps, with an evaluation every so many."""
    rows = [{"step": i, "loss": 1 / i} for i in range(1, steps + 1)]
    if every:
        rows += [{"step": i, "eval_loss": 2 / i} for i in range(every, steps + 1, every)]
    figure = figure_of(rows)
    figure.canvas.draw()
    return figure.axes[0]


@pytest.mark.parametrize("steps", [1, 2, 5, 2000])
def test_steps_are_whole_numbers(steps: int) -> None:
    axes = drawn(steps)
    marks = axes.get_xticks()
    assert all(mark == round(mark) for mark in marks)
    left, right = axes.get_xlim()
    assert any(left <= mark <= right for mark in marks)


def test_each_of_a_few_steps_is_marked() -> None:
    assert [drawn(steps).lines[0].get_marker() for steps in (1, FEW)] == ["o", "o"]
    assert drawn(FEW + 1).lines[0].get_marker() == "None"


def test_labels() -> None:
    axes = drawn(100, every=10)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "training loss",
        "evaluation loss",
    ]
    assert list(axes.lines[1].get_xdata()) == list(range(10, 101, 10))
    assert drawn(100).get_legend() is None
