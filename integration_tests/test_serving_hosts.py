"""`stack serve --hosts 2` of a checkpoint: the answers of one process, the end of a process, and SIGTERM."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from .served import Served, write_checkpoint

# The programs need not be fast, and compile in half of the time.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "hello", "max_tokens": 12},
    # Repeated text, which speculation continues.
    {"prompt": "abcabcabcabcabcabc", "max_tokens": 24},
    {"prompt": "hello", "max_tokens": 8, "structured_outputs": {"regex": "[0-9]{3}"}},
    {"prompt": [5, 6, 7, 8], "max_tokens": 4, "echo": True, "n": 2, "temperature": 1.0, "seed": 3},
)


def answer(server: Served, request: dict[str, Any]) -> list[Any]:
    body = {"model": server.model, "temperature": 0.0, "logprobs": 1, **request}
    answer = httpx2.post(f"{server.address}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def workers_of(server: Served) -> list[int]:
    """The processes forked by the agents that the server has started."""

    def children(pid: int) -> list[int]:
        found = Path(f"/proc/{pid}/task/{pid}/children")
        threads = [each / "children" for each in Path(f"/proc/{pid}/task").iterdir()] if found.exists() else []
        return [int(child) for thread in threads for child in thread.read_text().split()]

    return [worker for agent in children(server.process.pid) for worker in children(agent)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.05)


@pytest.mark.slow  # two servers; packages/serve/tests/parallel/test_hosts.py has one engine
def test_two_hosts_answer_as_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    options = ("--max-sequences", "4", "--max-tokens", "64", "--speculation", "ngram")
    variables = {"XLA_FLAGS": QUICK}
    alone = Served(f"hf:{tmp_path}", *options, variables=variables)
    expected = [answer(alone, request) for request in REQUESTS]
    alone.stop()

    server = Served(f"hf:{tmp_path}", *options, "--tensor", "4", "--hosts", "2", variables=variables)
    for request, choices in zip(REQUESTS, expected, strict=True):
        for one, two in zip(choices, answer(server, request), strict=True):
            assert one["text"] == two["text"] and one["finish_reason"] == two["finish_reason"], request
            found = [each["logprobs"]["token_logprobs"] for each in (one, two)]
            np.testing.assert_allclose(*(np.array(each, float) for each in found), rtol=1e-3, atol=1e-4)

    workers = workers_of(server)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    ready = f"{server.address}/ready"
    wait_until(lambda: httpx2.get(ready).status_code == 503)
    assert httpx2.get(ready).json()["error"]["code"] == "restarting"
    wait_until(lambda: httpx2.get(ready).status_code == 200)
    assert answer(server, REQUESTS[0])[0]["text"] == expected[0][0]["text"]

    left = workers_of(server)
    assert len(left) == 2 and not set(left) & set(workers)
    log = server.stop()
    assert "ended by SIGKILL" in log
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
