"""Records which functions of onnxpar each test calls, also in its child processes.

Python imports this module at its start where this folder is in PYTHONPATH. Each process appends to
a file of its own in the folder ONNXPAR_CALLS: a line `T test` where another test begins, a line
`F number file qualified.name` before a function's first call, and its number for each test that
calls it. Lines are written at once, since tests kill processes.
"""

import itertools
import os
import sys

TOOL = 4
ROOT = "/site-packages/onnxpar/"

calls = os.environ.get("ONNXPAR_CALLS")


class Recorder:
    """The file of this process."""

    def __init__(self):
        self.forget()

    def forget(self):
        """Opens another file at the next call: this is a fork."""
        self.file, self.test, self.numbers = None, None, {}
        self.next = itertools.count()

    def started(self, code, offset):
        """Hears of a function's first call since the events were restarted."""
        _, package, path = code.co_filename.rpartition(ROOT)
        if package:
            self.write(path, code)
        return sys.monitoring.DISABLE

    def write(self, path, code):
        if self.file is None:
            name = f"{calls}/{os.getpid()}-{os.urandom(4).hex()}.calls"
            self.file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        test, lines = os.environ.get("PYTEST_CURRENT_TEST", "-"), ""
        if test != self.test:
            self.test = test
            lines += f"T {test}\n"
        number = self.numbers.get(code)
        if number is None:
            number = self.numbers[code] = next(self.next)
            lines += f"F {number} {path} {code.co_qualname}\n"
        os.write(self.file, f"{lines}{number}\n".encode())


if calls:
    recorder = Recorder()
    os.register_at_fork(after_in_child=recorder.forget)
    sys.monitoring.use_tool_id(TOOL, "onnxpar")
    sys.monitoring.register_callback(TOOL, sys.monitoring.events.PY_START, recorder.started)
    sys.monitoring.set_events(TOOL, sys.monitoring.events.PY_START)
