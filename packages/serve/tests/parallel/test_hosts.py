"""One engine over two processes: the answers of the model, requests that are refused, and a process that is killed."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, GenerationError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_serve.parallel.config import ParallelConfig
from stack_serve.parallel.engine import ParallelEngine

from ..llm.tiny_checkpoint import hidden_states, random_params
from .engines import CONFIG, sharded_engine

# The programs of the processes need not be fast, and compile in half of the time.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
TENSOR = dataclasses.replace(CONFIG, tensor=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[ParallelEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", QUICK)
        engine = sharded_engine(TENSOR)
        with engine:
            yield engine


def submit(engine: ParallelEngine, name: str, prompt: Sequence[int], **sampling: object) -> list[GenerationUpdate]:
    params: dict[str, object] = {"max_tokens": 8, "temperature": 0.0, "logprobs": 1, **sampling}
    updates = list[GenerationUpdate]()
    request = GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=SamplingParams(**params))
    engine.submit(request, updates.append)
    return updates


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.002)


def ended(updates: list[GenerationUpdate]) -> bool:
    return bool(updates) and updates[-1].finish_reason is not None


def check(prompt: Sequence[int], updates: list[GenerationUpdate], count: int = 8) -> None:
    """Checks greedy tokens and their log-probabilities against the model in this process, without a cache."""
    found = [each for update in updates for each in update.logprobs or ()]
    assert [token for update in updates for token in update.tokens] == [each.token for each in found]
    assert len(found) == count, updates[-1]
    tokens = list(prompt)
    for each in found:
        logits = hidden_states(tokens)[-1] @ np.asarray(random_params()["head"])
        assert each.token == np.argmax(logits)
        expected = logits[each.token] - np.log(np.sum(np.exp(logits)))
        np.testing.assert_allclose(each.logprob, expected, rtol=1e-5, atol=1e-5)
        tokens.append(each.token)


def test_two_processes_give_the_answers_of_the_model(engine: ParallelEngine) -> None:
    assert len(set(engine.processes(0))) == 2
    prompts = [[1, 2, 3], [*range(4, 14)], [14]]
    long = submit(engine, "long", [20, 21], max_tokens=40)
    found = [submit(engine, str(i), prompt) for i, prompt in enumerate(prompts)]
    wait_until(lambda: bool(long))
    engine.abort("long")  # while the rows of the others are computed with it, or before them
    wait_until(lambda: all(map(ended, [long, *found])))
    assert long[-1].finish_reason in ("abort", "length")
    for prompt, updates in zip(prompts, found, strict=True):
        check(prompt, updates)
    # The second prompt has full pages in the prefix cache, and its keys are on both hosts.
    again = submit(engine, "again", [*prompts[1][:9], 2], prompt_logprobs=None)
    wait_until(lambda: ended(again))
    check([*prompts[1][:9], 2], again)
    wait_until(lambda: engine.stats().prefix_hits_tokens == 8)


def test_features_that_one_host_has_are_refused(engine: ParallelEngine) -> None:
    for call in (
        lambda: engine.embed([(1, 2)]),
        lambda: engine.sleep(1),
        lambda: engine.update_weights(random_params(1)),
    ):
        with pytest.raises(GenerationError, match="not available on an engine over several hosts"):
            call()
    updates = submit(engine, "after", [5, 6])
    wait_until(lambda: ended(updates))
    check([5, 6], updates)


def test_the_end_of_a_process_ends_the_requests_and_starts_the_engine_again(engine: ParallelEngine) -> None:
    processes = engine.processes(0)
    updates = submit(engine, "cut", [1], max_tokens=46)
    wait_until(lambda: bool(updates))
    os.kill(processes[1], signal.SIGKILL)
    wait_until(lambda: ended(updates))
    if updates[-1].finish_reason == "error":  # otherwise it was quicker
        assert "ended while it computed this request" in updates[-1].error or "has ended" in updates[-1].error
    wait_until(lambda: engine.engine_stats() == [None])
    for pid in processes:
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 3}, r"tensor=3 x expert=1 devices cannot be divided evenly among hosts=2"),
        ({"adapters": {"mine": "lora"}}, r"adapters: not available on an engine over hosts=2 hosts"),
        ({"embeddings": True}, r"embeddings: not available on an engine over hosts=2 hosts"),
        ({"speculation": "mtp"}, r"speculation mtp: not available"),
        ({"speculation": "draft", "draft_model": "small"}, r"speculation draft: not available"),
    ],
)
def test_settings_that_need_one_host_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharded_engine(dataclasses.replace(TENSOR, **changes))


def test_only_one_engine_can_be_sharded_over_hosts() -> None:
    for changes in ({"data_parallel": 2}, {"prefill_engines": 1}):
        with pytest.raises(ConfigError, match=f"hosts=2 and {next(iter(changes))}="):
            ParallelConfig(hosts=2, **changes)
