"""A rank of a launch that leads or follows: `python -m runtime.led_program WHAT TIMEOUT PAR...`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from onnxpar.base.errors import OnnxparError, RankError
from onnxpar.runtime.launch.follow import follow
from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.runtime.launch.lead import Lead
from onnxpar.runtime.ranks.orders import Orders
from onnxpar.runtime.session.session import InferenceSession

PROMPTS = ([5, 6, 7], [8, 9])


def say(*words: object) -> None:
    """Prints a line at once."""
    print(*words, flush=True)


def open_led(lead: Lead, par: str, **options: object) -> InferenceSession:
    """A session that all ranks have."""
    timeout = float(sys.argv[2])
    return InferenceSession(par, start_ranks=lead, timeout=timeout, **options)  # type: ignore[arg-type]


def answers(lead: Lead, par: str) -> None:
    """Saves results of requests of which some are bad, with a long pause after the first."""
    found = []
    with open_led(lead, par) as session:
        session.states.write("s", np.zeros((4, 1, 8), np.float32))
        for number, row in enumerate((None, 3, None, 0, None)):
            ids = np.arange(4)[:, None] + number
            if row is not None:
                ids[row] = 1000
            try:
                found.append(session.run(["y"], {"ids": ids}, keep_states=True)[0])
            except OnnxparError as error:
                say(type(error).__name__, error)
            if number == 0:
                time.sleep(2.5 * float(sys.argv[2]))
    np.save(Path(par).with_name("found.npy"), np.stack(found))


def calls(lead: Lead, par: str) -> None:
    """Makes each call of a session, by hand and by name."""
    folder = Path(par).with_name("saved")
    folder.mkdir()
    trace = Path(par).with_name("trace.json")
    ids = np.arange(4)[:, None]
    with open_led(lead, par, profile=True) as session:
        session.states.write("s", np.ones((4, 1, 8), np.float32))
        (y,) = session.run(["y"], {"ids": ids}, keep_states=True)
        kept = session.states.read("s")
        ranks = session._ranks
        ranks.save_states(str(folder), ())
        session.states.reset()
        session.states.clear({"s": (4, 1, 8)})
        assert not session.states.read("s").any()
        ranks.load_states(str(folder), ["s"], ())
        np.testing.assert_array_equal(session.states.read("s"), kept)
        assert session.exchange(b"x") == [b"x"]
        session.write_log(["a line"])
        found = session.end_profile(trace)
        assert found is not None
    say(trace.exists(), float(y.sum()))


def two(lead: Lead, *pars: str) -> None:
    """Runs two sessions by turns, closes one, and opens another."""
    x = np.arange(28, dtype=np.float32).reshape(4, 7)
    first, second = (open_led(lead, par) for par in pars)
    for scale in (1, 2):
        say(*(float(s.run(["y"], {"x": scale * x})[0].sum()) for s in (first, second)))
    first.close()
    say(float(second.run(["y"], {"x": x})[0].sum()))
    with open_led(lead, pars[0]) as third:
        say(*(float(s.run(["y"], {"x": x})[0].sum()) for s in (third, second)))


def generate(lead: Lead, par: str) -> None:
    """Generates with a language model, whose encoder and decoder are sessions of their own."""
    from onnxpar.llm.generator import Generator

    with Generator(par, start_ranks=lead, timeout=float(sys.argv[2])) as generator:
        for prompt in PROMPTS:
            say(*generator.generate(prompt, max_new_tokens=12)[0].tokens)


def idle(lead: Lead, par: str) -> None:
    """Makes no call until a rank is lost."""
    with open_led(lead, par) as session:
        say("up")
        while True:
            session.check_alive()
            time.sleep(0.05)


def busy(lead: Lead, par: str) -> None:
    """Makes calls until a rank is lost."""
    x = np.ones((4, 7), np.float32)
    with open_led(lead, par) as session:
        say("up")
        while True:
            session.run(None, {"x": x})


WHAT: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (answers, calls, two, generate, idle, busy)
}


def main() -> int:
    launched = launched_rank()
    assert launched is not None
    try:
        orders = Orders(launched, float(sys.argv[2]))
        if launched.rank:
            return follow(orders)
        with Lead(orders) as lead:
            WHAT[sys.argv[1]](lead, *sys.argv[3:])
    except RankError as error:
        say(type(error).__name__, error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
