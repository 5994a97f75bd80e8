"""Makes the recorder hear of each test's first calls, and writes how long tests take."""

import json
import os
import sys


def pytest_runtest_logstart(nodeid):
    sys.monitoring.restart_events()


def pytest_runtest_logreport(report):
    if not hasattr(report, "node"):  # that is, not the process that hands out tests
        with open(f"{os.environ['ONNXPAR_CALLS']}/{os.getpid()}.times", "a") as file:
            file.write(f"{report.duration:.4f}\t{report.outcome}\t{json.dumps(report.nodeid)}\n")
