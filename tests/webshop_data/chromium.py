"""A headless Chromium driven through its debugging pipe: enough to open pages, click, type and look.

No driver program and no socket: the browser reads commands from file descriptor 3 and answers on 4, as JSON texts that
end with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

TIMEOUT_S = 30.0


def find_chromium() -> str | None:
    """The path of an installed Chromium or Chrome."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


class Chromium:
    """One browser with one page. Use as a context manager."""

    def __init__(self, program: str, profile: Path) -> None:
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()
        command = (
            f'exec "{program}" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars '
            f'--no-first-run --user-data-dir="{profile}" --remote-debugging-pipe about:blank '
            f"3<&{read_commands} 4>&{write_answers}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        os.close(self._read)

    def open(self, url: str) -> None:
        self._after_load("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str, text: str = "") -> None:
        """A mouse click in the middle of the first visible match (whose text is ``text``), then wait for the page."""
        found = (
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".find(e => !{json.dumps(text)} || e.innerText.trim() === {json.dumps(text)})"
        )
        box = self.evaluate(
            f"(() => {{ const e = {found}; if (!e) return null; e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        assert box is not None, f"no {selector} with the text {text!r} on {self.evaluate('location.href')}"
        where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type="mousePressed", **where)
        self._after_load("Input.dispatchMouseEvent", type="mouseReleased", **where)

    def type(self, selector: str, text: str) -> None:
        """Replace what is in a field."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self._call("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self._after_load("Input.dispatchKeyEvent", type="keyDown", **key)

    def screenshot(self, path: Path, width: int = 1280, height: int = 900) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _after_load(self, method: str, **arguments: Any) -> None:
        self._events.clear()
        self._call(method, **arguments)
        deadline = time.monotonic() + TIMEOUT_S
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive(deadline)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message; events are also kept."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"the browser said nothing for {TIMEOUT_S:g} s"
            block = os.read(self._read, 1 << 16)
            assert block, f"the browser ended with code {self._process.poll()}"
            self._buffer += block
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message
