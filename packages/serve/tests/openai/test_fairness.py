"""A request costs others no more than a slice of the event loop, however large it or its answer is."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from .conftest import Served
from .fake_engine import FakeEngine, checkpoint
from .test_server import process

PATH = "/v1/completions"
MOST_HELD_S = 0.06
"""Of CPU time: a slice, and what one call of orjson or pydantic takes of a body."""


@contextlib.contextmanager
def held(server: Served) -> Iterator[Callable[[], float]]:
    """Measures the most CPU time that the event loop's thread spent between two turns of another task, in seconds."""
    loop = server.http._loop
    assert loop is not None
    turns = list[float]()

    async def watch() -> None:
        while True:
            turns.append(time.thread_time())
            await asyncio.sleep(0)

    gc.collect()
    gc.freeze()  # what other tests left is not to be searched in one of the turns
    watching = asyncio.run_coroutine_threadsafe(watch(), loop)
    try:
        yield lambda: max(np.diff(turns))
    finally:
        watching.cancel()
        gc.unfreeze()


class Thorough(FakeEngine):
    """Takes as long to check a request as an engine does."""

    def submit(self, *given: Any) -> None:
        until_s = time.thread_time() + 0.0002
        while time.thread_time() < until_s:
            pass
        super().submit(*given)


def large_server(serve: Callable[..., Served]) -> Served:
    engine = Thorough(most=1000, max_tokens=2**20)
    return serve(engine, model=checkpoint(max_positions=2**20), max_choices=1000)


@pytest.mark.covering
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[97 + number % 26] * 100 for number in range(1000)], "max_tokens": 2},
        {"prompt": [97] * 4000, "max_tokens": 1, "echo": True, "logprobs": 20},
    ],
    ids=["a thousand prompts", "echoed log-probabilities"],
)
def test_a_large_request_holds_the_loop_for_slices_only(
    serve: Callable[..., Served], body: dict[str, Any], stream: bool
) -> None:
    server = large_server(serve)
    server.post(PATH, **{**body, "prompt": body["prompt"][:1]}, stream=stream)  # functions get their type checks now
    with held(server) as most_s:
        answer = server.post(PATH, **body, stream=stream)
        assert answer.status_code == 200
        assert most_s() < MOST_HELD_S
    assert server.complete(max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello world " * 2000, "return_token_strs": True}),
        ("/detokenize", {"tokens": [261, 262] * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 2000, "max_tokens": 1}),
    ],
)
def test_texts_and_messages_are_made_beside_the_loop(
    serve: Callable[..., Served], path: str, body: dict[str, Any]
) -> None:
    server = large_server(serve)
    with held(server) as most_s:
        assert server.post(path, **body).status_code == 200
        assert most_s() < MOST_HELD_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("large", "least_bytes", "times"),
    [
        ({"prompt": [97] * 200, "max_tokens": 1, "echo": True, "logprobs": 20, "n": 128}, 5_000_000, 6),
        ({"prompt": [[97 + number % 26] * 100 for number in range(1000)], "max_tokens": 2}, 100_000, 1),
    ],
    ids=["echoed log-probabilities", "a thousand prompts"],
)
def test_streams_keep_their_pace_beside_a_large_request(large: dict[str, Any], least_bytes: int, times: int) -> None:
    """The p99 of the time between tokens of 200 streams grows by at most a half and 5 ms."""

    async def gaps_s(client: httpx2.AsyncClient, number: int, arrived: list[float]) -> None:
        body = {"prompt": "x", "seed": number, "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with client.stream("POST", PATH, json=body) as answer:
            assert answer.status_code == 200
            last_s = None
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now_s = time.monotonic()
                    arrived += [] if last_s is None else [now_s - last_s]
                    last_s = now_s

    async def p99_s(address: str, beside: dict[str, Any] | None) -> float:
        arrived = list[float]()
        limits = httpx2.Limits(max_connections=300)
        async with httpx2.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
            streams = [gaps_s(client, number, arrived) for number in range(200)]
            other = [] if beside is None else [client.post(PATH, json=beside) for _ in range(times)]
            answers = (await asyncio.gather(*streams, *other))[len(streams) :]
            assert all(answer.status_code == 200 and len(answer.content) > least_bytes for answer in answers)
        return float(np.percentile(arrived, 99))

    with process("100") as (_, client):
        address = str(client.base_url)
        alone_s = asyncio.run(p99_s(address, None))
        beside_s = asyncio.run(p99_s(address, large))
        assert beside_s < 1.5 * alone_s + 0.005, f"{alone_s:.3f} s alone"
