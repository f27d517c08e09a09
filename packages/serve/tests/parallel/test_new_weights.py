"""New weights of several engines: keys of older ones, restarts, encoders and requests in flight."""

import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.encoder_engine import EncoderEngine
from stack_serve.llm.engine import LLMEngine
from stack_serve.parallel.config import ParallelConfig
from stack_serve.parallel.hosted import HostedReplica, Result
from stack_serve.parallel.opening import check_parallel
from stack_serve.parallel.weights import SharedWeights

from ..llm.tiny_checkpoint import VOCAB, TinyCheckpoint, random_params
from .engines import CONFIG, TinyEncoder, encoder_engine, open_letters, tiny_engine, weights


def wait_until(condition: Any) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.001)


def request_of(name: str, prompt: tuple[int, ...], max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0)
    )


def test_keys_of_older_weights_are_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE", "0")
    emitted, names, prompt = list[Any](), map(str, itertools.count()), tuple(range(9))
    replica = HostedReplica(open_letters, emitted.extend, {}, ())
    replica.start(None)

    def receive(handover: Any) -> int:
        """Submits a request with pages and returns the number of all pages received so far."""
        name, engine = next(names), replica._engine
        replica.submit(request_of(name, prompt, 1), handover)
        wait_until(lambda: any(getattr(each, "request_id", None) == name for each in emitted))
        return engine.imported

    export, is_locked = replica._engine.export_pages, list[bool]()
    monkeypatch.setattr(
        replica._engine,
        "export_pages",
        lambda request: is_locked.append(replica._weights_lock.locked()) or export(request),
    )
    assert receive(replica._offer(request_of("", prompt, 1))) == 2
    assert is_locked == [True]  # the keys have the number of the weights
    older = replica._offer(request_of("", prompt, 1))
    replica.receive_weights(1, weights())
    wait_until(lambda: Result(1, None) in emitted)
    replica.use_weights(2, 1, 7, "keep")
    wait_until(lambda: Result(2, None) in emitted)
    assert receive(older) == 2
    assert receive(replica._offer(request_of("", prompt, 1))) == 4
    replica.close(0.0)


def test_updates_are_kept_until_later_ones_replace_them() -> None:
    first = SharedWeights().updated({"a": np.ones(2), "b": np.ones(2)}, None)
    second = first.updated({"b": np.zeros(2)}, 9)
    assert (second.version, second.updates, len(second.changed)) == (9, 2, 2)
    third = second.updated({"a": np.zeros(2), "b": np.zeros(2)}, None)
    assert (third.version, third.updates, len(third.changed)) == (10, 3, 1)
    assert third.reset() == SharedWeights(10, 3)


def test_an_encoder_has_no_prefill_engines() -> None:
    check_parallel(TinyEncoder(), ParallelConfig(data_parallel=2))
    with pytest.raises(ConfigError, match="prefill_engines=1: 'tiny-encoder' is an encoder"):
        check_parallel(TinyEncoder(), ParallelConfig(prefill_engines=1))


@pytest.mark.slow
def test_engines_of_an_encoder_embed_with_new_weights() -> None:
    config, texts = EngineConfig(step_tokens=32, max_tokens=16), [[1, 2, 3], [4, 5]]
    expected = [
        EncoderEngine(TinyEncoder(read=lambda s=s: random_params(s)), config).embed(texts, pooling="mean")
        for s in (0, 1)
    ]
    with encoder_engine(config) as engine:
        found = [[engine.embed(texts, pooling="mean") for _ in range(2)]]
        engine.update_weights(random_params(1))
        found.append([engine.embed(texts, pooling="mean") for _ in range(2)])
    for each, vectors in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, [vectors] * 2, atol=1e-5)


def _updates_of_a_busy_engine(new: Any, kv: Any) -> dict[str, list[GenerationUpdate]]:
    """Submits requests until new weights have arrived, and one more after an engine was killed."""
    found = dict[str, list[GenerationUpdate]]()
    with tiny_engine(prefill_engines=1) as engine, ThreadPoolExecutor(1) as pool:

        def submit() -> None:
            number = len(found)
            updates = found[str(number)] = []
            prompt = tuple((number + place) % VOCAB for place in range(9))
            wait_until(lambda: len(engine._running) < 8)
            engine.submit(request_of(str(number), prompt, 30), updates.append)

        for _ in range(20):
            submit()
        update = pool.submit(engine.update_weights, new, version=7, kv=kv)
        while not update.done():
            submit()
        update.result()
        wait_until(lambda: not engine._running)
        pids = engine.pids
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: engine.pids[0] not in (None, pids[0]))
        submit()
        wait_until(lambda: not engine._running)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_requests_in_flight_continue_with_new_weights(kv: Any) -> None:
    new, mixed, rests = random_params(1), 0, dict[str, list[int]]()
    config = replace(CONFIG, max_waiting=10_000)
    with LLMEngine(TinyCheckpoint(read=lambda: new), config) as one:
        for name, updates in _updates_of_a_busy_engine(new, kv).items():
            tokens = [token for update in updates for token in update.tokens]
            versions = [version for update in updates for version in update.weights_versions]
            assert len(tokens) == 30 and versions == sorted(versions) and set(versions) <= {0, 7}
            older = versions.count(0)
            mixed += 0 < older < 30
            # With their old keys, requests continue otherwise than new ones.
            if older == 0 or (kv == "recompute" and older < 30):
                prompt = tuple((int(name) + place) % VOCAB for place in range(9))
                rests[name] = tokens[older:]
                one.submit(request_of(name, (*prompt, *tokens[:older]), 30 - older))
        for name, rest in rests.items():
            assert [token for update in one.stream(name) for token in update.tokens] == rest
    assert mixed and versions[0] == 7
