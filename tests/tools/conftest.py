"""A local Ray whose workers find the repository, and an endpoint that answers over real HTTP."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
        ray.init(num_cpus=4, include_dashboard=False, address="local", logging_level="WARNING")
        yield
        ray.shutdown()


class Endpoint:
    """A chat endpoint. ``policy(prompt) -> text`` answers; ``faults`` are given to requests before it, first to last.

    A fault is ``(status, headers, body)``, or a number: seconds that the answer takes.
    """

    def __init__(self) -> None:
        self.policy: Callable[[str], str] = lambda prompt: "yes"
        self.faults: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, headers, text = endpoint.answer(self.path, body, self.headers.get("Authorization"))
                data = text.encode()
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Tests are quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def answer(self, path: str, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, str], str]:
        with self._lock:
            self.requests.append(body)
            self.keys.append(key)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            fault = self.faults.pop(0) if self.faults else None
        try:
            if isinstance(fault, tuple):
                return fault
            time.sleep(fault or 0.0)
            if path != "/v1/chat/completions":
                return 404, {}, "no such path"
            choice = {"message": {"content": self.policy(body["messages"][0]["content"])}, "finish_reason": "stop"}
            return 200, {}, json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        finally:
            with self._lock:
                self.in_flight -= 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint()
    yield served
    served.close()
