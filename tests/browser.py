"""Chromium without a window, driven over its pipe: pages at any width, in light or dark mode."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
TIMEOUT = 60.0
"""Seconds for one answer of the browser."""
PHONE, DESKTOP = 390, 1280
"""Widths of a window, in CSS pixels."""
_FLAGS = ("background-networking", "component-update", "sync", "gpu", "dev-shm-usage")


class Browser:
    """One open page of a browser."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._from = to, answers
        self._read, self._number, self._session = b"", 0, ""
        self._events: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")

    def open(
        self,
        place: Path | str,
        width: int = DESKTOP,
        height: int = 800,
        dark: bool = False,
        scale: int = 1,
    ) -> None:
        """Shows a file or a URL in a window of this size in CSS pixels, each of `scale` on the
        screen, as a phone does where it is narrow."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        mode = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[mode])
        self._events.clear()
        url = place if isinstance(place, str) else place.resolve().as_uri()
        self._call("Page.navigate", url=url)
        until = time.monotonic() + TIMEOUT
        while "Page.loadEventFired" not in self._events:
            self._events.append(self._message("Page.navigate", until).get("method", ""))

    def media(self, kind: str) -> None:
        """Shows the page as on paper where this is `print`, and on the screen where it is empty."""
        self._call("Emulation.setEmulatedMedia", media=kind)

    def without_scripts(self, disabled: bool = True) -> None:
        """Whether pages that are opened from now on run no script of their own."""
        self._call("Emulation.setScriptExecutionDisabled", value=disabled)

    def run(self, script: str) -> Any:
        """The value of an expression on the page, awaited where it is a promise."""
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def printed(self) -> bytes:
        """The page as a PDF."""
        return base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"])

    def screenshot(self, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        clip: dict[str, Any] = {}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {**size, "scale": 1}, "captureBeyondViewport": True}
        return base64.b64decode(self._call("Page.captureScreenshot", format="png", **clip)["data"])

    def _call(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT
        while True:
            answer = self._message(method, until)
            self._events.append(answer.get("method", ""))
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: dict[str, Any] = answer["result"]
                return found

    def _message(self, method: str, until: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            answers = select.poll()  # select() takes no descriptor above 1023
            answers.register(self._from, select.POLLIN)
            if not answers.poll(1000 * max(until - time.monotonic(), 0)):
                raise TimeoutError(f"the browser has not answered {method} in {TIMEOUT:.0f} s")
            found = os.read(self._from, 1 << 20)
            if not found:
                raise ConnectionError(f"the browser ended before it answered {method}")
            self._read += found
        message, self._read = self._read.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the block."""
    assert BROWSER is not None
    commands, to = os.pipe()
    answers, back = os.pipe()

    # The browser reads commands from descriptor 3, and writes its answers to descriptor 4.
    connected = f'exec "$0" "$@" 3<&{commands} 4>&{back}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars"]
        flags += [*(f"--disable-{it}" for it in _FLAGS), f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            ["bash", "-c", connected, BROWSER, *flags, "--remote-debugging-pipe", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(commands, back),
        )
        os.close(commands)
        os.close(back)
        try:
            yield Browser(to, answers)
        finally:
            os.close(to)  # the browser ends with its pipe
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            os.close(answers)
