"""A server is asked, read and compared; a small one runs in a thread."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ab_engines
import ab_vllm
import pytest
from ab_job import Job
from ab_server import UrlEngine


class Server(ThreadingHTTPServer):
    """Streams tokens 1, 2, .. in threes, with ids or without; or fails."""

    kind = "ids"


class Handler(BaseHTTPRequestHandler):
    """Speaks a little of OpenAI's protocol."""

    server: Server

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._head("application/json")
        self.wfile.write(b'{"data": [{"id": "served"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "served" and body["stream"] and self.path == "/v1/completions"
        kind, count = self.server.kind, body["max_tokens"]
        if kind == "refuse":
            self.send_error(400, "no token ids here")
            return
        self._head("text/event-stream")
        if kind == "die":
            self.wfile.write(b"1000\r\ndata: {")  # of a chunk of 4096 bytes
            return
        for start in range(1, count + 1, 3):
            ids = list(range(start, min(start + 3, count + 1)))
            choice: dict[str, Any] = {"text": "".join(f" {token}" for token in ids)}
            if kind != "text":
                choice["token_ids"] = ids if kind == "ids" else []
            self._send({"choices": [choice]})
            if kind == "break":
                self._send({"error": {"message": "no more memory"}})
        self._send({"choices": [{"text": "", "finish_reason": "length"}]})
        self._send({"choices": [], "usage": {"completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _head(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if self.server.kind == "die" and self.command == "POST":
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


@pytest.fixture
def server() -> Iterator[Server]:
    """A server in a thread."""
    with Server(("127.0.0.1", 0), Handler) as own:
        thread = threading.Thread(target=own.serve_forever, args=(0.01,))
        thread.start()
        yield own
        own.shutdown()
        thread.join()


FAILURES = [("refuse", "no token ids"), ("break", "no more"), ("die", "IncompleteRead")]


def served(server: Server, **changes: Any) -> Job:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    own = Job(
        engine="url",
        mode="server",
        model="served",
        url=url,
        max_model_len=128,
        prompts=[[5, 6, 7], [8, 9, 10, 11]],
        max_tokens=7,
        loads=[(2, 2)],
    )
    return replace(own, **changes)


@pytest.mark.parametrize("kind", ["ids", "text", "empty ids"])
def test_a_server_is_read_with_ids_or_without(server: Server, kind: str) -> None:
    server.kind = kind
    found = ab_engines.run(served(server, loads=[(1, 2), (2, 2)]))
    for run in found["runs"]:
        for record in run["records"]:
            assert record["num_tokens"] == 7 and record["finish_reason"] == "length"
            tokens = [each for _, each in record["emissions"]]
            assert tokens == ([3, 3, 1] if kind == "ids" else [None] * 3)
            assert record["token_ids"] == (list(range(1, 8)) if kind == "ids" else None)
            assert record["text"] == (None if kind == "ids" else " 1 2 3 4 5 6 7")


@pytest.mark.parametrize(("kind", "message"), FAILURES)
def test_a_server_that_fails_says_why(server: Server, kind: str, message: str) -> None:
    server.kind = kind
    with pytest.raises(SystemExit, match=message):
        ab_engines.run(served(server))


def test_an_url_without_a_server_is_named() -> None:
    with pytest.raises(SystemExit, match="does not name a model"):
        UrlEngine(Job(engine="url", model="", url="http://127.0.0.1:9/v1", max_model_len=9))


def test_a_server_is_compared(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(job: Job, path: Path) -> dict[str, Any]:
        return ab_engines.run(job)

    monkeypatch.setattr(ab_vllm, "run_apart", run_here)
    url = f"http://127.0.0.1:{server.server_address[1]}/v1/"
    command = f"--engine-url {url} --limit 2 --concurrency 2 --modes none --max-tokens 16"
    options = ["--nanospec-options", '{"device": "cpu", "kv_cache_gib": 0.1}']
    for temperature in (0.0, 0.5):
        ab_vllm.main([*command.split(), "--temperature", str(temperature), *options])
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [row["engine"] for row in found["rows"]] == ["nanospec", "url"]
        (own,) = found["pairs"]
        assert own["other"] == "url server" and found["rows"][1]["acceptance_length"] == 3.0
        assert own["identical"] == (0.0 if temperature == 0 else None)  # else sampled
