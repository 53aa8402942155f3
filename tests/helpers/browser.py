"""Drive a headless Chromium: DevTools messages over two pipes, so that no other package is needed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
# Chromium reads messages from descriptor 3 and writes them to 4.
LAUNCHER = "import os, sys; _, r, w, *c = sys.argv; os.dup2(int(r), 3); os.dup2(int(w), 4); os.execvp(c[0], c)"
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")


class ProtocolError(RuntimeError):
    """The browser refused a call."""


class Browser:
    """A browser with one page.

    `problems` are its console messages, exceptions and refused loads; `urls` is what it loaded.
    """

    def __init__(self, executable: str, profile: Path):
        self.problems: list[str] = []
        self.urls: list[str] = []
        self._unread, self._num_calls, self._session = b"", 0, {}
        read_end, self._writer = os.pipe()
        self._reader, write_end = os.pipe()
        command = [sys.executable, "-c", LAUNCHER, str(read_end), str(write_end), executable, *OPTIONS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"], pass_fds=(read_end, write_end), stderr=subprocess.DEVNULL
        )
        os.close(read_end)
        os.close(write_end)
        self._open_page()

    def _open_page(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load an address in a page without storage, and forget what was recorded."""
        self.call("Page.navigate", url="about:blank")
        self.call("Storage.clearDataForOrigin", origin=url, storageTypes="all")
        self.problems.clear()
        self.urls.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression. Raises RuntimeError if it throws."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true, in a page that may yet load."""
        end = time.monotonic() + TIMEOUT_S
        while not self._is_true(condition):
            assert time.monotonic() < end, f"still not true: {condition}; problems: {self.problems}"
            time.sleep(0.02)

    def _is_true(self, condition: str) -> bool:
        try:
            return bool(self.evaluate(condition))
        except ProtocolError:  # another page is loading
            return False

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol. Raises ProtocolError."""
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": parameters, **self._session}
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while (answer := self._read_message()).get("id") != self._num_calls:
            self._record(answer)
        if "error" in answer:
            raise ProtocolError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read_message(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            readable, _, _ = select.select([self._reader], [], [], TIMEOUT_S)
            data = os.read(self._reader, 2**16) if readable else b""
            if not data:
                raise RuntimeError("chromium does not answer")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _record(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(parameters["exceptionDetails"]["exception"]["description"])
            case "Runtime.consoleAPICalled":
                self.problems.append(str([a.get("value") for a in parameters["args"]]))
            case "Log.entryAdded":
                self.problems.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.urls.append(parameters["request"]["url"])

    def close(self) -> None:
        """End the browser."""
        self._session = {}
        try:
            self.call("Browser.close")
            self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._reader)
            os.close(self._writer)
