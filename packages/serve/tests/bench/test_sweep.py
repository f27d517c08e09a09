import asyncio
import math
from typing import Any

import pytest

from stack_core.abi.errors import BenchmarkError
from stack_serve.bench.lengths import Lengths
from stack_serve.bench.load import Load, LoadResult, run_load
from stack_serve.bench.requests import Requests
from stack_serve.bench.results import Results
from stack_serve.bench.sweep import Sweep
from stack_serve.client.endpoint import Endpoint

from ..openai_server import Server


def measured(
    server: Server, *loads: Load, model: str | None = None, timeout_s: float = 30.0, **options: Any
) -> Results:
    sweep = Sweep(
        loads=loads,
        prompts=options.pop("prompts", Lengths.parse("6:9")),
        answers=options.pop("answers", Lengths.parse("5")),
        extra=options.pop("extra", {}),
        **options,
    )

    async def run() -> Results:
        async with Endpoint(server[1], timeout_s=timeout_s) as endpoint:
            return await sweep.measured(endpoint, model)

    return asyncio.run(run())


@pytest.mark.parametrize("load", [Load("concurrency", 3.0, 7), Load("rate", 200.0, 7), Load("rate", math.inf, 7)])
def test_every_request_of_a_load_is_sent_and_counted(openai_server: Server, load: Load) -> None:
    (point,) = measured(openai_server, load).points
    assert (point.kind, point.value, point.requests, point.completed) == (load.kind, load.value, 7, 7)
    assert point.answer_tokens == 35
    assert point.failures == {}
    assert len(openai_server[0].bodies) == 1 + 7  # one to learn how many tokens words have


@pytest.mark.parametrize(("load", "most"), [(Load("concurrency", 3.0, 12), 3), (Load("rate", math.inf, 12), 12)])
def test_so_many_run_at_once(openai_server: Server, load: Load, most: int) -> None:
    measured(openai_server, load, answers=Lengths.parse("60"))
    assert openai_server[0].most == most


def test_a_rate_is_kept_whatever_the_server_does(openai_server: Server) -> None:
    measured(openai_server, Load("rate", 100.0, 40), answers=Lengths.parse("100"))
    assert openai_server[0].most > 10  # each takes 0.2 s or more, and one begins every 0.01 s


def test_requests_that_wait_for_the_client_were_due_before(openai_server: Server) -> None:
    """All are due at once, and a client sends one after the other."""
    asked = Requests(model="plain", prompts=Lengths.parse("3"), answers=Lengths.parse("2"))

    async def run() -> LoadResult:
        async with Endpoint(openai_server[1]) as endpoint:
            return await run_load(endpoint, asked, Load("rate", math.inf, 5))

    calls = asyncio.run(run()).calls
    assert len({call.due_s for call in calls}) == 1
    assert len({call.sent_s for call in calls}) == 5


def test_prompts_of_words_have_the_lengths_that_were_asked_for(openai_server: Server) -> None:
    """A word is a token there, and the template has three more, of which the first request tells."""
    (point,) = measured(openai_server, Load("concurrency", 1.0, 4), prompts=Lengths.parse("400"), chat=True).points
    assert point.prompt_tokens == pytest.approx(1600, rel=0.01)


def test_prompts_of_ids_have_exact_lengths(openai_server: Server) -> None:
    found = measured(openai_server, Load("concurrency", 1.0, 4), prompts=Lengths.parse("50"), vocab_size=7)
    assert found.points[0].prompt_tokens == 200
    assert {token for body in openai_server[0].bodies for token in body["prompt"]} == set(range(7))


def test_the_seed_decides_what_is_asked(openai_server: Server) -> None:
    def asked(seed: int) -> list[Any]:
        openai_server[0].bodies.clear()
        measured(openai_server, Load("concurrency", 1.0, 3), Load("rate", math.inf, 2), seed=seed, warm_up=2)
        assert len(openai_server[0].bodies) == 1 + 2 + 3 + 2
        return [(body["prompt"], body["max_tokens"]) for body in openai_server[0].bodies[:6]]

    first = asked(0)
    assert asked(0) == first
    assert asked(1) != first
    assert len(set(first)) == len(first)  # no prompt is one that a server may have kept


def test_bodies_are_greedy_streams_with_what_was_given(openai_server: Server) -> None:
    measured(openai_server, Load("concurrency", 1.0, 1), model="uncounted", extra={"ignore_eos": True, "top_k": 3})
    body = openai_server[0].bodies[-1]
    assert (body["model"], body["stream"], body["temperature"], body["max_tokens"]) == ("uncounted", True, 0.0, 5)
    assert (body["ignore_eos"], body["top_k"], body["stream_options"]) == (True, 3, {"include_usage": True})


def test_pieces_of_text_are_not_counted_as_tokens(openai_server: Server) -> None:
    """A piece may hold several: 96 tokens came as 24 pieces."""
    (point,) = measured(openai_server, Load("concurrency", 1.0, 2), model="uncounted").points
    assert (point.completed, point.answer_tokens, point.prompt_tokens, point.total_tokens_per_s) == (
        2,
        None,
        None,
        None,
    )
    assert point.tpot_s is None and point.itl_s is not None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("busy", r"\(http 429\): .*The queue is full"),
        ("cut", r"\(stream\)"),
        ("broken", r"\(error\): The stream has an error: .*out of order"),
        ("other", r"\(error\): The stream has an event of an unexpected format"),
        ("empty", r"\(empty\): The answer has no text"),
    ],
)
def test_a_server_that_answers_nothing_is_not_measured(openai_server: Server, model: str, message: str) -> None:
    with pytest.raises(BenchmarkError, match=f"Nothing was measured because a first request failed {message}"):
        measured(openai_server, Load("concurrency", 1.0, 1), model=model)


def test_failures_under_load_are_counted_by_kind(openai_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = openai_server
    complete = server._events

    def events(body: dict[str, Any]) -> Any:
        models = ["plain", "plain", "cut", "broken", "empty", "endless"]
        return complete({**body, "model": models[min(len(server.bodies) - 1, 5)]})

    monkeypatch.setattr(server, "_events", events)
    (point,) = measured(openai_server, Load("concurrency", 1.0, 5), timeout_s=0.3).points
    assert point.failures == {"empty": 1, "error": 1, "stream": 1, "timeout": 1}
    assert point.completed == 1
