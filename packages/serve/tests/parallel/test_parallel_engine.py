"""Engines in processes of their own: the answers of one engine, routes, and a process that is killed."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConversionError, GenerationError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_serve.llm.engine import LLMEngine

from ..llm.tiny_checkpoint import TinyCheckpoint
from ..openai.conftest import Served, starting
from ..openai.fake_engine import letters
from ..openai.test_metrics import values
from .engines import CONFIG, LATE, SLOW, letter_engine, tiny_engine, weights


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with starting() as start:
        yield start(letter_engine(prefill_engines=1), adapter_loading=True, sleep_mode=True)


def text_of(prompt: tuple[int, ...], count: int, index: int = 0) -> str:
    request = GenerationRequest(request_id="", prompt=prompt, sampling=SamplingParams(seed=1))
    return "".join(chr(token) for token, _ in zip(letters(request, index), range(count), strict=False))


def counts(server: Served, field: str = "prompt_tokens") -> list[int | None]:
    return [stats and getattr(stats, field) for stats in server.engine.engine_stats()]


def test_requests_are_shared_by_prefix_and_load(server: Served) -> None:
    prompts = [tuple(range(i, i + 20)) for i in (0, 40)]
    bodies = [{"prompt": [*prompts[i % 2], i], "seed": 1, "n": 1 + i % 2} for i in range(6)]
    for i, body in enumerate(bodies):
        choices = server.complete(**body)["choices"]
        expected = [text_of(tuple(body["prompt"]), 4, index) for index in range(1 + i % 2)]
        assert [choice["text"] for choice in choices] == expected
    events = server.events("/v1/completions", **bodies[0], max_tokens=4)
    assert "".join(event["choices"][0]["text"] for event in events) == text_of((*prompts[0], 0), 4)
    # Equal prefixes of four pages and more meet; the rest goes to the less loaded engine, the first if equal.
    # Engine 2 computes the two prompts that no other engine has.
    server.wait_until(lambda: counts(server) == [7, 0, 2] and counts(server, "steps") == [10, 0, 0])
    done = [threading.Thread(target=server.complete, kwargs={"prompt": [SLOW, i], "max_tokens": 20}) for i in range(4)]
    for thread in done:
        thread.start()
    for thread in done:
        thread.join()
    server.wait_until(lambda: counts(server) == [9, 2, 2])
    lines = server.client.get("/metrics").text
    for number, count in enumerate((9, 2, 2)):
        assert f'vllm:prompt_tokens_total{{engine="{number}",model_name="tiny"}} {count}.0' in lines
        assert f'stack:engine_up{{engine="{number}",model_name="tiny"}} 1.0' in lines
    assert values(server)["vllm:request_success_total", "length"] == 14  # continuations, of both engines
    assert server.client.get("/health").status_code == 200
    assert server.engine.memory() == "engine 0: little; engine 1: little; engine 2: little"


def test_what_is_said_to_the_engine_reaches_all_engines_or_none(server: Served) -> None:
    refused = server.refused("/v1/completions", prompt=[1], max_tokens=1, stop_token_ids=[10**6])
    assert "stop_tokens" in refused["message"]
    refused = server.refused("/v1/completions", prompt=[1], structured_outputs={"regex": "a"})
    assert refused["message"] == "structured_outputs: no constraints here"
    assert "cannot be read" in server.refused("/v1/load_lora_adapter", lora_name="x", lora_path="bad-1")["message"]
    assert server.engine.adapters == ("given",)
    server.wait_until(lambda: counts(server, "preemptions") == [1, 1, 1])
    assert server.post("/v1/load_lora_adapter", lora_name="x", lora_path="good").status_code == 200
    assert server.post("/v1/unload_lora_adapter", lora_name="given").status_code == 200
    assert server.complete(model="x", prompt=[1], seed=1)["choices"][0]["text"] == text_of((1,), 4)
    assert server.post("/v1/embeddings", input=[[7, 8]]).json()["data"][0]["index"] == 0

    running = threading.Thread(target=server.complete, kwargs={"prompt": [SLOW], "max_tokens": 50})
    running.start()
    server.wait_until(lambda: bool(server.engine._running))
    assert server.post("/sleep").status_code == 409
    running.join()
    assert server.post("/sleep?level=2").status_code == 200
    assert server.refused("/v1/completions", 503, prompt="x")["code"] == "sleeping"
    assert server.post("/wake_up").status_code == 200
    server.complete()


def shifted(text: str, shift: int) -> str:
    return "".join(chr(97 + (ord(letter) - 97 + shift) % 26) for letter in text)


def test_new_weights_reach_all_engines_or_none(server: Served) -> None:
    engine = server.engine
    shifts, prompts = {0: 0, 5: 3, 6: 4}, [(SLOW, i) for i in range(2)]

    def begin(count: int) -> list[list[GenerationUpdate]]:
        found = list[list[GenerationUpdate]]()
        for prompt in prompts:
            updates, sampling = list[GenerationUpdate](), SamplingParams(max_tokens=count, seed=1)
            request = GenerationRequest(request_id=f"{prompt} {count}", prompt=prompt, sampling=sampling)
            engine.submit(request, updates.append)
            found.append(updates)
        assert {running.engine for running in engine._running.values()} == {0, 1}
        server.wait_until(lambda: all(found))
        return found

    def check(found: list[list[GenerationUpdate]], versions: set[int]) -> None:
        for prompt, updates in zip(prompts, found, strict=True):
            server.wait_until(lambda updates=updates: updates[-1].finish_reason is not None)
            tokens = [update for update in updates if update.tokens]
            texts = {version: shifted(text_of(prompt, len(tokens)), shift) for version, shift in shifts.items()}
            assert [update.text for update in tokens] == [
                texts[update.weights_versions[0]][place] for place, update in enumerate(tokens)
            ]
            assert {update.weights_versions[0] for update in tokens} == versions

    found = begin(9000)
    engine.update_weights(weights(shift=3), version=5)
    server.wait_until(lambda: all(updates[-1].weights_versions == (5,) for updates in found))
    for name in list(engine._running):
        engine.abort(name)
    check(found, {0, 5})
    server.wait_until(lambda: counts(server, "weights_version") == [5, 5, 5])
    assert 'stack:engine_weights_version{engine="2",model_name="tiny"} 5.0' in server.client.get("/metrics").text

    with pytest.raises(
        GenerationError, match=r"Engine 1 cannot take .* no engine did\. All answer with version 5.*no mem"
    ):
        engine.update_weights(weights(shift=9, unplaced_by=1))
    with pytest.raises(ConversionError, match=r"\['other'\] is unknown"):
        engine.update_weights({"other": np.zeros(2)})
    with pytest.raises((GenerationError, TypeError), match="drop"):  # tests check types before
        engine.update_weights(weights(), kv="drop")  # pyrefly: ignore
    check(begin(10), {5})

    pids = engine.pids
    with pytest.raises(GenerationError, match=r"Engine 1 did not take version 6 .* others answer with version 6.*swap"):
        engine.update_weights({name: value for name, value in weights(shift=4, unused_by=1).items() if value >= 0})
    server.wait_until(lambda: None not in engine.pids and counts(server, "weights_version") == [6, 6, 6])
    assert [new == old for new, old in zip(engine.pids, pids, strict=True)] == [True, False, True]
    check(begin(10), {6})

    params = {name: jnp.asarray(value) for name, value in weights().items()}
    engine.update_weights(params, version=0, donate=True)
    assert all(array.is_deleted() for array in params.values())
    server.wait_until(lambda: counts(server, "weights_version") == [0, 0, 0])


def test_engines_that_fell_asleep_in_vain_get_the_weights_again(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sleeping = server.engine, list[Any]()
    replicas, pids = engine._replicas, engine.pids
    catch_up = replicas._catch_up
    engine.update_weights(weights(shift=3, keeps_awake=0, lost_by=1), version=8)
    monkeypatch.setattr(replicas, "_catch_up", lambda each: (sleeping.append(replicas.sleeping), catch_up(each)))
    with pytest.raises(GenerationError, match="cannot sleep"):
        engine.sleep(2)
    server.wait_until(lambda: None not in engine.pids)
    assert sleeping == [2, 2, 2, None]  # requests are refused until all engines that run have the weights
    assert [new == old for new, old in zip(engine.pids, pids, strict=True)] == [True, False, True]
    found = {}
    for number in range(2):
        updates = found[number] = list[GenerationUpdate]()
        sampling = SamplingParams(max_tokens=4, seed=1)
        engine.submit(GenerationRequest(request_id=str(number), prompt=(SLOW,), sampling=sampling), updates.append)
    assert {running.engine for running in engine._running.values()} == {0, 1}
    server.wait_until(lambda: not engine._running)
    for updates in found.values():
        assert "".join(each.text for each in updates) == shifted(text_of((SLOW,), 4), 3)
    engine.update_weights(weights(), version=0)


def test_a_killed_engine_is_replaced_while_the_other_serves_on(server: Served) -> None:
    """What was streamed of a request cannot be taken back; other requests are computed again."""
    found: dict[str, Any] = {}

    def stream(name: str, first: int) -> None:
        answer = server.post("/v1/completions", prompt=[first], max_tokens=100, seed=1, stream=True)
        found[name] = answer.text

    def complete(name: str, first: int) -> None:
        found[name] = server.post("/v1/completions", prompt=[first], max_tokens=4, seed=1)

    engine = server.engine
    server.post("/v1/load_lora_adapter", lora_name="x", lora_path="good")  # refused if another test has loaded it
    adapters = counts(server, "preemptions")
    threads = []
    for name, target, first in (("cut", stream, SLOW), ("whole", stream, SLOW), ("late", complete, LATE)):
        threads.append(threading.Thread(target=target, args=(name, first)))
        threads[-1].start()
        server.wait_until(lambda: len(engine._running) == len(threads))
    cut, whole, late = engine._running.values()
    assert (cut.engine, whole.engine, late.engine) == (0, 1, 0)
    server.wait_until(lambda: cut.is_streamed and whole.is_streamed)
    pids = engine.pids
    os.kill(pids[0], signal.SIGKILL)
    down = 'stack:engine_up{engine="0",model_name="tiny"} 0.0'
    server.wait_until(lambda: down in server.client.get("/metrics").text)
    for thread in threads:
        thread.join()
    assert "Engine 0 ended while it computed this request. Send it again." in found["cut"]
    assert f"pid {pids[0]}" in found["cut"] and "Traceback" not in found["cut"]
    assert found["whole"].endswith("data: [DONE]\n\n")
    assert found["late"].json()["choices"][0]["text"] == text_of((LATE,), 4)
    # The new process has the adapters that were loaded.
    server.wait_until(lambda: None not in engine.pids)
    assert engine.pids[0] != pids[0] and engine.pids[1] == pids[1]
    server.wait_until(lambda: counts(server, "preemptions") == adapters)
    assert engine.stats().running == 0 and engine._loads == [0, 0, 0]
    server.complete(model="x")
    assert counts(server)[0] == 1


def test_a_killed_prefill_engine_leaves_its_prompts_to_the_others(server: Served) -> None:
    engine, prompt = server.engine, (LATE, *range(30, 40))
    found = list[Any]()
    body = {"prompt": list(prompt), "max_tokens": 4, "seed": 1}
    thread = threading.Thread(target=lambda: found.append(server.complete(**body)))
    thread.start()
    server.wait_until(lambda: [running.engine for running in engine._running.values()] == [2])
    os.kill(engine.pids[2], signal.SIGKILL)
    thread.join()
    assert found[0]["choices"][0]["text"] == text_of(prompt, 4)
    # An abort during the computation of a prompt ends the request.
    server.wait_until(lambda: None not in engine.pids)
    request = GenerationRequest(request_id="a", prompt=(LATE, *range(9)), sampling=SamplingParams(n=2, max_tokens=4))
    updates = list[Any]()
    engine.submit(request, updates.append)
    engine.abort("a")
    server.wait_until(lambda: len(updates) == 2)
    assert [(update.index, update.finish_reason) for update in updates] == [(0, "abort"), (1, "abort")]
    assert engine._loads == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("prefill", [False, True])
def test_tokens_and_log_probabilities_are_those_of_one_engine(prefill: bool) -> None:
    requests = [
        GenerationRequest(
            request_id=f"r{i}",
            prompt=tuple(range(i, i + 3 + i)),
            sampling=SamplingParams(max_tokens=8, seed=i, temperature=i / 4, n=1 + i % 2, logprobs=0),
        )
        for i in range(8)
    ]

    def answers(engine: Any) -> list[list[tuple[int, float]]]:
        found = []
        for request in requests:
            engine.submit(request)
        for request in requests:
            each: list[Any] = [[] for _ in range(request.sampling.n)]
            for update in engine.stream(request.request_id):
                each[update.index] += zip(update.tokens, [x.logprob for x in update.logprobs or ()], strict=True)
            found += each
        return found

    with LLMEngine(TinyCheckpoint(), CONFIG) as one:
        expected = answers(one)
    settings = {"engines": 1, "prefill_engines": 1} if prefill else {}
    with tiny_engine(**settings) as engine:
        found = answers(engine)
        assert all(stats is not None and stats.generated_tokens for stats in engine.engine_stats())
        assert engine.embed([[1, 2, 3]]).shape == (1, 16)
        if prefill:
            stats = engine.engine_stats()[0]
            # Engine 1 computed the full pages of all prompts without equal prefixes.
            expected_hits = sum((len(each.prompt) - 1) // 4 * 4 * each.sampling.n for each in requests)
            assert stats is not None and stats.prefix_hits_tokens == expected_hits
    assert [[token for token, _ in each] for each in found] == [[token for token, _ in each] for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert [logprob for _, logprob in ours] == pytest.approx([logprob for _, logprob in theirs], abs=1e-5)
