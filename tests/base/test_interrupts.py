"""Signals that arrive in a block that must not be left half-done."""

from __future__ import annotations

import signal

import pytest

from onnxpar.base.interrupts import Terminated, raise_for, uninterrupted


def test_a_signal_takes_effect_after_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        raise_for(signal.SIGINT)
        done.append(True)
    assert done


def test_two_signals_end_one_block_and_not_a_later_one() -> None:
    with pytest.raises(Terminated), uninterrupted():
        raise_for(signal.SIGINT)
        raise_for(signal.SIGTERM)
    with uninterrupted():
        pass
