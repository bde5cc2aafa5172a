"""A server under test, spoken to by OpenAI's protocol."""

import contextlib
import http.client
import json
import queue
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ab_job import Job, Update

_SILENCE = 300.0  # seconds without a byte, after which a server counts as gone


class UrlEngine:
    """A server that speaks OpenAI's completions protocol, streaming, a thread per request.

    vLLM's server also streams token ids. Of others only the text and, at the end, the number of
    tokens are known. A server may send the tokens of several steps together.
    """

    def __init__(self, job: Job):
        assert job.url is not None
        self._job = job
        parts = urlsplit(job.url)
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._base = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        self._updates: queue.Queue[Update | Exception] = queue.Queue()
        try:
            with urllib.request.urlopen(f"{self._base}/models") as response:
                self._model = json.load(response)["data"][0]["id"]
        except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
            sys.exit(f"{self._base}/models does not name a model: {error}")

    def start(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See `AbEngine.start`."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": self._job.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Of vLLM and its like; others go by the model's own end.
            "stop_token_ids": self._job.stop_ids,
            "ignore_eos": not self._job.stop_ids,
            "return_token_ids": True,
        }
        threading.Thread(target=self._request, args=(index, body), daemon=True).start()

    def step(self) -> list[Update]:
        """See `AbEngine.step`."""
        found = [self._updates.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._updates.get_nowait())
        updates = []
        for each in found:
            if isinstance(each, Exception):
                sys.exit(f"{self._base}/completions failed: {each}")
            updates.append(each)
        return updates

    def drain(self) -> None:
        """See `AbEngine.drain`."""

    def _request(self, index: int, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            f"{self._base}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_SILENCE) as response:
                self._read(index, response)
        except urllib.error.HTTPError as error:
            reason = error.read(500).decode(errors="replace")
            self._updates.put(OSError(f"{error}: {reason}"))
        except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
            self._updates.put(error)

    def _read(self, index: int, lines: Any) -> None:
        reason, total = None, None
        has_ids: bool | None = None
        for line in lines:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[len(b"data:") :])
            if "error" in event:
                raise OSError(str(event["error"]))
            if event.get("usage"):
                total = event["usage"]["completion_tokens"]
            for choice in event.get("choices", ()):
                reason = choice.get("finish_reason") or reason
                ids, text = choice.get("token_ids") or None, choice.get("text") or ""
                if ids and has_ids is None:
                    has_ids = True  # from its first event on, or not at all
                if text and has_ids is None:
                    has_ids = False
                if has_ids and ids:
                    self._updates.put(Update(index, ids, text))
                elif text and not has_ids:
                    self._updates.put(Update(index, None, text))
        if reason is None or (total is None and not has_ids):
            raise OSError("a stream ended without a finish reason, token ids or usage")
        last: list[int] | None = [] if has_ids else None
        self._updates.put(Update(index, last, "", reason, None if has_ids else total))
