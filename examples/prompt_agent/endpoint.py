"""An OpenAI-compatible chat endpoint in the place of a rollout engine.

``EndpointEngine`` is a Ray actor that keeps requests in flight, and ``EndpointClient`` the ``GenerationClient`` around
it, so the rollout loop of training plays with an endpoint as it plays with its own engines. An endpoint takes and
gives text: ``TextCodec`` stands where the tokenizer would, and its "token ids" are the characters of the text.

A call that fails for a passing reason (time limit, lost connection, HTTP 408, 409, 425, 429, 5xx) is repeated after a
growing wait, which the server can set with ``Retry-After``; one that fails otherwise, or too often, ends the
evaluation with what the server said.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import ray

from verl.workers.rollout.base import FINISH_LENGTH, FINISH_STOP, RolloutRequest, RolloutResult

_PASSING = frozenset({408, 409, 425, 429})
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_GATHER_S = 0.02  # answers that come so close together are handed on together
_REPLY_S = 0.25  # a call that brings no answer returns after so long, so that new requests get in
_SHOWN = 400  # characters of a server's message


@dataclass(frozen=True)
class EndpointSettings:
    """Where the model is and how it is asked.

    Attributes:
        base_url: up to and with ``/v1``.
        model: name the server knows it by.
        api_key: sent as a bearer token; None sends none.
        concurrency: requests in flight at most.
        request_timeout_s: limit of one try, seconds.
        max_retries: further tries after the first.
        max_tokens_field: ``max_completion_tokens`` for servers that refuse ``max_tokens``.
        send_seed: each request's seed goes along.
        extra_body: further fields of every request; None as value removes a field.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 16
    request_timeout_s: float = 120.0
    max_retries: int = 5
    max_tokens_field: str = "max_tokens"
    send_seed: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url {self.base_url!r} has to start with http:// or https://")
        for option, value, least in (
            ("--concurrency", self.concurrency, 1),
            ("--max-retries", self.max_retries, 0),
        ):
            if value < least:
                raise ValueError(f"{option} {value} has to be at least {least}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("the variable that --api-key-env names holds a line break or letters that no key has")
        if not self.request_timeout_s > 0:
            raise ValueError(f"--request-timeout {self.request_timeout_s} has to be positive")

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + "/chat/completions"

    def body(self, prompt: str, request: RolloutRequest) -> dict[str, Any]:
        """The JSON of a request: one user turn."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self.max_tokens_field: sampling.max_tokens,
        }
        if sampling.top_k != -1:
            body["top_k"] = sampling.top_k  # not in OpenAI's own interface, but in vLLM's and others
        if self.send_seed:
            body["seed"] = request.seed
        body.update(self.extra_body)
        return {key: value for key, value in body.items() if value is not None}


class TextCodec:
    """A tokenizer whose tokens are characters and whose chat is the bare text of the turn."""

    pad_token_id = 0
    eos_token_id = 0

    def apply_chat_template(self, chat: Sequence[Mapping[str, str]], **_: Any) -> str:
        return chat[-1]["content"]

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    def decode(self, ids: Sequence[int] | np.ndarray, **_: Any) -> str:
        return "".join(map(chr, np.asarray(ids, dtype=np.int64).tolist()))

    def batch_decode(self, sequences: Sequence[Any], **options: Any) -> list[str]:
        return [self.decode(ids, **options) for ids in sequences]


class EndpointError(ValueError):
    """The endpoint cannot be used; the message says what it answered and what to change."""


class _Passing(Exception):
    """A try that failed for a reason that may pass. ``wait_s`` is what the server asks for, if it does."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class EndpointCalls:
    """Requests in flight. ``step`` has the contract of an engine: it takes new ones and returns what finished."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._codec = TextCodec()
        self._running: set[asyncio.Task[RolloutResult]] = set()
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._turn = asyncio.Lock()  # calls are answered in their order; their requests start at once
        self._session: aiohttp.ClientSession | None = None
        self.counts: dict[str, float] = {"retries": 0.0, "prompt_tokens": 0.0, "completion_tokens": 0.0}

    async def step(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        """Starts ``requests`` and returns what is answered, at the latest after a moment.

        Raises:
            EndpointError: a request failed for good; the others are given up.
        """
        self._running |= {asyncio.create_task(self._answer(request)) for request in requests}
        async with self._turn:
            if not self._running:
                return []
            done, _ = await asyncio.wait(self._running, timeout=_REPLY_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                await asyncio.sleep(_GATHER_S)
                done = {task for task in self._running if task.done()}
            self._running -= done
            try:
                return [task.result() for task in done]
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """Gives up what is in flight."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def statistics(self) -> dict[str, float]:
        return dict(self.counts)

    # ------------------------------------------------------------------ one request

    async def _answer(self, request: RolloutRequest) -> RolloutResult:
        body = self._settings.body(self._codec.decode(request.prompt_ids), request)
        tries = self._settings.max_retries + 1
        reason = ""
        async with self._slots:
            for number in range(tries):
                try:
                    return self._result(request, await self._post(body))
                except _Passing as failure:
                    reason = str(failure)
                    if number + 1 < tries:
                        self.counts["retries"] += 1
                        await asyncio.sleep(_wait_before(number, failure.wait_s))
        raise EndpointError(
            f"{self._settings.url} failed {tries} times on one request, last: {reason}. Check --base-url, lower "
            "--concurrency, raise --request-timeout or --max-retries; the same command goes on with the episodes that "
            "are not finished"
        )

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                trust_env=True, timeout=aiohttp.ClientTimeout(total=self._settings.request_timeout_s)
            )
        key = self._settings.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with self._session.post(self._settings.url, json=body, headers=headers) as response:
                text = await response.text(errors="replace")
                status, asked = response.status, response.headers.get("Retry-After")
        except asyncio.TimeoutError:
            raise _Passing(f"no answer within --request-timeout {self._settings.request_timeout_s:g} s") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Passing(f"no connection: {error}") from error
        except (aiohttp.InvalidURL, aiohttp.ClientError) as error:
            raise EndpointError(f"--base-url {self._settings.base_url} cannot be used: {error!r}") from error
        if status in _PASSING or status >= 500:
            raise _Passing(f"HTTP {status}: {text[:_SHOWN]}", _seconds(asked))
        if status >= 400:
            raise EndpointError(f"{self._settings.url} answers HTTP {status}: {text[:_SHOWN]}. {_remedy(status)}")
        return _json_object(text, self._settings)

    def _result(self, request: RolloutRequest, answer: Mapping[str, Any]) -> RolloutResult:
        try:
            choice = answer["choices"][0]
            text = _text(choice["message"].get("content"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(f"{self._settings.url} answers no chat completion: {str(answer)[:_SHOWN]}") from error
        usage = answer.get("usage")
        for name in ("prompt_tokens", "completion_tokens"):
            count = usage.get(name) if isinstance(usage, Mapping) else None
            self.counts[name] += count if isinstance(count, (int, float)) else 0
        ids = np.asarray(self._codec([text])["input_ids"][0], dtype=np.int32)
        reason = FINISH_LENGTH if choice.get("finish_reason") == "length" else FINISH_STOP
        return RolloutResult(request.request_id, ids, np.zeros(len(ids), dtype=np.float32), reason)


class EndpointClient:
    """The ``GenerationClient`` of an endpoint: a single replica, in a Ray actor of its own."""

    num_replicas = 1

    def __init__(self, settings: EndpointSettings) -> None:
        self._actor = ray.remote(num_cpus=0)(EndpointCalls).remote(settings)

    def begin(self) -> dict[str, float]:
        return {}

    def end(self) -> dict[str, float]:
        return {}

    def submit(self, replica: int, requests: Sequence[RolloutRequest], max_steps: int) -> ray.ObjectRef:
        return self._actor.step.remote(list(requests))

    def receive(self, call: ray.ObjectRef) -> list[RolloutResult]:
        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (EndpointError(str(cause)) if isinstance(cause, EndpointError) else error) from None

    def check(self) -> None:
        """There are no further ranks."""

    def statistics(self) -> dict[str, float]:
        """Retries, and the tokens that the server counted, since the start."""
        return ray.get(self._actor.statistics.remote(), timeout=60)

    def close(self) -> None:
        ray.kill(self._actor)


def _wait_before(number: int, asked: float | None) -> float:
    """Seconds before retry ``number`` (from 0): doubling, spread by up to a half; or what the server asks for."""
    if asked is not None:
        return min(asked, _LONGEST_WAIT_S)
    return min(_FIRST_WAIT_S * 2**number, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


def _seconds(header: str | None) -> float | None:
    """``Retry-After`` in seconds; None where it is absent or a date."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None


def _remedy(status: int) -> str:
    return {
        401: "Set the key in the environment variable that --api-key-env names",
        403: "The key is not allowed to use this model",
        404: "Check --base-url (it ends in /v1) and --model",
    }.get(status, "Check --model, --max-tokens-field and --extra-body")


def _text(content: Any) -> str:
    """The text of a message: as it stands, or in parts; nothing where there is none. Halves of characters become ``?``.

    Raises:
        TypeError, KeyError: it is something else.
    """
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise TypeError(f"a message of type {type(content).__name__}")
    return (content or "").encode("utf-8", errors="replace").decode("utf-8")


def _json_object(text: str, settings: EndpointSettings) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise EndpointError(
            f"{settings.url} answers no JSON: {text[:_SHOWN]!r}. Check --base-url (it ends in /v1)"
        ) from None
    if not isinstance(answer, dict):
        raise EndpointError(f"{settings.url} answers no chat completion: {text[:_SHOWN]}")
    return answer
