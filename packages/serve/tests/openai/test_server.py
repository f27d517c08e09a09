import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

SCRIPT = Path(__file__).with_name("serve_fake.py")
LONG = {"prompt": "hello", "max_tokens": 60, "stream": True, "ignore_eos": True}


@contextlib.contextmanager
def process(*arguments: str, ready: bool = True) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    """A server's process, and a client of it."""
    command = [sys.executable, str(SCRIPT), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            if ready:
                assert server.stdout.readline() == f"http://127.0.0.1:{port}\n"
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                yield server, client
        finally:
            server.kill()


def finish_reasons(lines: Iterator[str]) -> list[str]:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [event["choices"][0]["finish_reason"] if "choices" in event else event["error"]["code"] for event in events]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_new_requests_and_lets_answers_end(number: signal.Signals) -> None:
    with process("20") as (server, client), client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.send_signal(number)
        deadline_s = time.monotonic() + 10
        with pytest.raises(httpx2.ConnectError):
            while time.monotonic() < deadline_s:
                # A connection that was made while the listener closes is dropped unread.
                with (
                    httpx2.Client(base_url=client.base_url) as other,
                    contextlib.suppress(httpx2.RemoteProtocolError, httpx2.ReadError),
                ):
                    other.get("/health")
        assert finish_reasons(lines)[-1] == "length"
        assert server.wait(120) == 0
        assert server.stderr is not None and server.stderr.read() == ""


def test_answers_that_take_too_long_are_cut_short() -> None:
    body = {**LONG, "max_tokens": 250}
    with process("0.2") as (server, client), client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.send_signal(signal.SIGTERM)
        assert finish_reasons(lines)[-1] == "unavailable"
        assert server.wait(120) == 0


def test_a_second_signal_ends_at_once() -> None:
    with process("20", "stuck") as (server, client), client.stream("POST", "/v1/completions", json=LONG) as answer:
        next(answer.iter_lines())
        deadline_s = time.monotonic() + 15
        while server.poll() is None and time.monotonic() < deadline_s:
            server.send_signal(signal.SIGTERM)  # of several that wait together, one is delivered
            time.sleep(0.1)
        assert server.poll() == 128 + signal.SIGTERM


def test_while_it_starts_it_says_so() -> None:
    with process("1", "slow", ready=False) as (server, client):
        assert client.get("/health").status_code == 200
        answer = client.get("/ready")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "starting"
        answer = client.post("/v1/completions", json=LONG)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert client.get("/v1/models").status_code == 200 and client.get("/metrics").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0


def test_an_engine_that_cannot_start_ends_the_server() -> None:
    with process("1", "broken", ready=False) as (server, _):
        assert server.wait(120) == 1
        assert server.stderr is not None and server.stderr.read() == "refused: The engine cannot start.\n"
