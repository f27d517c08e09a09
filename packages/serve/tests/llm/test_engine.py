"""What an engine does around its steps; what it generates is compared with models in integration_tests/."""

import dataclasses
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.engines import Engine
from stack_core.abi.errors import ConversionError, EngineBusy, EngineStopped, GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_core.ops.sampling.sampling import SamplingSettings
from stack_serve.llm import dispatcher, loop
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.dispatcher import Dispatcher
from stack_serve.llm.engine import LLMEngine

from .tiny_checkpoint import EMBED, VOCAB, TinyCheckpoint, random_params, share_programs

CONFIG = EngineConfig(max_sequences=4, step_tokens=16, page_tokens=4, max_waiting=20)


class Words:
    """A tokenizer whose token i is the letter i; one of them cannot be decoded."""

    vocab_size, eos_id, bos_id = VOCAB, None, None
    broken: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def encode_batch(self, texts: Any) -> list[np.ndarray]:
        return [np.array(self.encode(text)) for text in texts]

    def save(self, directory: Path) -> None: ...

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def decode(self, ids: Any) -> str:
        if self.broken in ids:
            raise ValueError("no such letter")
        return "".join(chr(ord("a") + index) for index in ids)


def request_of(name: str, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> GenerationRequest:
    timeout_s = sampling.pop("timeout_s", None)
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return GenerationRequest(request_id=name, prompt=prompt, sampling=params, timeout_s=timeout_s)


def run(engine: LLMEngine, *requests: GenerationRequest) -> list[list[GenerationUpdate]]:
    for request in requests:
        engine.submit(request)
    return [list(engine.stream(request.request_id)) for request in requests]


def tokens_of(updates: list[GenerationUpdate]) -> list[int]:
    return [token for update in updates for token in update.tokens]


def test_a_capture_has_requests_and_steps(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`integration_tests/test_profiled_requests.py` reads them from a trace."""
    spans: list[tuple[str, float, dict[str, Any]]] = []
    for module in (loop, dispatcher):
        monkeypatch.setattr(module, "spans_recorded", lambda: True)
        monkeypatch.setattr(module, "record_span", lambda name, s, **fields: spans.append((name, s, fields)))
    before = engine.stats()
    run(engine, request_of("one", tuple(range(1, 21)), max_tokens=3), request_of("two", n=2, temperature=1.0))
    after = engine.stats()
    queued = [fields for name, _, fields in spans if name == "queue"]
    assert {(each["request"], each["index"], each["prompt_tokens"]) for each in queued} == {
        ("one", 0, 20),
        ("two", 0, 3),
        ("two", 1, 3),
    }
    steps = [fields["rows"] for name, _, fields in spans if name == "engine_step"]
    assert len(steps) == after.steps - before.steps
    rows = [row for step in steps for row in step]
    assert sum(new for *_, new in rows) == after.generated_tokens - before.generated_tokens == 19
    assert sum(prompt for _, _, prompt, _ in rows) + sum(each["cached_tokens"] for each in queued) == 26
    sent = [fields for name, _, fields in spans if name == "stream"]
    assert sum(fields["tokens"] for fields in sent) == 19
    assert [fields["end"] for fields in sent if fields["end"]] == ["length"] * 3
    assert all(seconds >= 0 for _, seconds, _ in spans)


@pytest.fixture(scope="module")
def words() -> Words:
    return Words()


@pytest.fixture(scope="module")
def compiled() -> list[tuple[str, int, int]]:
    """The programs that `engine` compiled before it started, as it reported them."""
    return []


@pytest.fixture(scope="module")
def engine(words: Words, compiled: list[tuple[str, int, int]]) -> Iterator[LLMEngine]:
    engine = LLMEngine(TinyCheckpoint(tokenizer=words), CONFIG, progress=lambda *given: compiled.append(given))
    engine.warm_up()
    with engine:
        yield engine


@pytest.fixture(scope="module")
def single() -> Iterator[LLMEngine]:
    """An engine that decodes one token in a launch."""
    with LLMEngine(TinyCheckpoint(), dataclasses.replace(CONFIG, decode_repeats=1)) as engine:
        yield engine


def another(compiled: LLMEngine, checkpoint: TinyCheckpoint) -> LLMEngine:
    """Returns an engine that has not started, with the settings and the compiled programs of another one."""
    engine = LLMEngine(checkpoint, compiled._programs._config)
    share_programs(compiled, engine)
    return engine


@pytest.fixture
def idle(engine: LLMEngine) -> LLMEngine:
    """An engine that has not started: requests wait."""
    return another(engine, TinyCheckpoint())


@pytest.fixture
def cold() -> LLMEngine:
    """An engine that has not started, without compiled programs and with a short queue."""
    return LLMEngine(TinyCheckpoint(), dataclasses.replace(CONFIG, max_waiting=6))


def test_it_meets_the_contract(engine: LLMEngine) -> None:
    assert isinstance(engine, Engine)
    assert isinstance(TinyCheckpoint(), GenerativeCheckpoint)


def test_progress_counts_every_program(engine: LLMEngine, compiled: list[tuple[str, int, int]]) -> None:
    assert sorted(done for _, done, _ in compiled) == list(range(1, compiled[0][2] + 1))
    assert len({name for name, _, _ in compiled}) == len(compiled) and "admit" in {name for name, _, _ in compiled}


def test_nothing_is_compiled_once_it_is_warm_on_any_thread(engine: LLMEngine) -> None:
    warm, events = LLMEngine(TinyCheckpoint(), CONFIG), list[str]()
    # Other tests may have made `engine` compile more than it did before its start.
    warm._programs._compiled.programs |= {key: engine._programs._compiled[key] for key in warm._programs._keys()}
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    with warm:
        requests = [request_of(f"long {length}", (5,) * length, temperature=1.0) for length in (1, 3, 17, 33)]
        run(warm, request_of("one"), *requests, request_of("prompt", (1,) * 20, prompt_logprobs=2, logprobs=3, n=3))
        assert warm.stats().compilations == 0
    jax.jit(lambda x: x + 1)(1)  # of which is heard
    assert len([event for event in events if event.endswith("backend_compile_duration")]) == 1


def test_each_program_has_a_name_and_its_parts_have_scopes(engine: LLMEngine) -> None:
    programs = engine._programs
    texts = {key: programs._lowered(key).as_text(debug_info=True) for key in programs._keys()}
    for (kind, *_), text in texts.items():
        assert f"module @jit_{kind} " in text and (kind == "admit" or f"/{kind}/" in text)
    assert all("/decode/while/body/sample/" in text for (kind, *_), text in texts.items() if kind == "decode")


def test_what_is_compiled_late_is_counted(cold: LLMEngine) -> None:
    with cold:
        run(cold, request_of("cold", max_tokens=1))
    assert cold.stats().compilations > 0


def test_a_request_tells_its_times_and_text(engine: LLMEngine) -> None:
    (updates,) = run(engine, request_of("told"))
    times = updates[-1].times
    assert updates[-1].finish_reason == "length" and len(tokens_of(updates)) == 8
    assert "".join(update.text for update in updates) == Words().decode(tokens_of(updates))
    assert times is not None and times.started_s is not None and times.first_token_s is not None
    assert times.submitted_s <= times.started_s <= times.first_token_s <= (times.finished_s or 0)


def candidates_of(updates: list[GenerationUpdate]) -> list[tuple[int, ...]]:
    return [each for update in updates for each in update.candidates or ()]


def test_candidates_are_the_tokens_with_a_probability_and_rows_beside_them_stay_the_same(engine: LLMEngine) -> None:
    plain = request_of("beside", (2,) * 20, temperature=1.0, seed=3)
    (alone,) = run(engine, plain)
    processed = {"temperature": 9.0, "seed": 4, "logprobs": 20, "logprobs_of": "processed", "candidates": True}
    narrowed = {"narrow": {"top_k": 5}, "min": {"min_p": 0.8}, "nucleus": {"top_p": 0.4}}
    requests = [request_of(name, (1,) * 20, **processed, **settings) for name, settings in narrowed.items()]
    beside, *found = run(engine, plain, *requests)
    assert tokens_of(beside) == tokens_of(alone) and not candidates_of(beside)
    for updates in found:
        logprobs = [each for update in updates for each in update.logprobs or ()]
        expected = [tuple(sorted(token for token, value in each.top if value > -np.inf)) for each in logprobs]
        assert candidates_of(updates) == expected and len(expected) == 8
        assert any(1 < len(each) < VOCAB for each in expected)
    (greedy,) = run(engine, request_of("greedy", candidates=True, max_tokens=1))
    assert candidates_of(greedy) == [(token,) for token in tokens_of(greedy)]


def test_updates_may_go_to_a_receiver(engine: LLMEngine) -> None:
    ended, received = threading.Event(), list[GenerationUpdate]()

    def receive(update: GenerationUpdate) -> None:
        received.append(update)
        if update.finish_reason:
            ended.set()

    engine.submit(request_of("received"), receive)
    assert ended.wait(300)
    assert len(tokens_of(received)) == 8
    with pytest.raises(GenerationError, match="No request 'received'"):
        next(engine.stream("received"))


def test_a_receiver_that_fails_harms_no_other(engine: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: GenerationUpdate) -> None:
        raise RuntimeError("not mine")

    engine.submit(request_of("failing"), fail)
    (other,) = run(engine, request_of("unharmed"))
    assert len(tokens_of(other)) == 8
    assert "receiver of request 'failing'" in caplog.text


def test_several_continuations_have_seeds_of_their_own_and_share_the_prompt(engine: LLMEngine) -> None:
    prompt = tuple(range(13))
    (updates,) = run(engine, request_of("n", prompt, n=3, temperature=2.0, seed=5, max_tokens=12))
    found = [tokens_of([update for update in updates if update.index == index]) for index in range(3)]
    assert [len(tokens) for tokens in found] == [12] * 3
    assert len({tuple(tokens) for tokens in found}) == 3
    cached = {update.index: update.cached_tokens for update in updates}
    assert cached[1] == cached[2] == 12


def test_the_prompts_log_probabilities_come_first_even_while_tokens_are_held_back(engine: LLMEngine) -> None:
    (whole,) = run(engine, request_of("whole text"))
    begins_so = Words().decode(tokens_of(whole)[:1]) + " not so"
    (updates,) = run(engine, request_of("held", stop=(begins_so,), prompt_logprobs=1))
    assert updates[0].tokens == () and tokens_of(updates) == tokens_of(whole)
    assert [update.prompt_logprobs is not None for update in updates] == [True] + [False] * (len(updates) - 1)


@pytest.mark.parametrize("length", [33, 39])  # the last part is a token, as when it decodes; or several
def test_nothing_is_told_of_a_prompt_before_its_last_part(engine: LLMEngine, length: int) -> None:
    (updates,) = run(engine, request_of("in parts", (5,) * length, max_tokens=3, prompt_logprobs=0))
    assert all(update.tokens for update in updates)
    (first, *logprobs) = updates[0].prompt_logprobs or ()
    assert first is None and len(logprobs) == length - 1 and None not in logprobs


def test_a_seed_gives_the_same_whatever_else_runs(engine: LLMEngine) -> None:
    wanted = {"temperature": 1.5, "seed": 11, "max_tokens": 16}
    (alone,) = run(engine, request_of("alone", **wanted))
    crowd = [request_of(f"other {index}", (index,) * 9, temperature=1.0) for index in range(5)]
    found = run(engine, *crowd[:3], request_of("crowded", **wanted), *crowd[3:])
    assert tokens_of(found[3]) == tokens_of(alone)


def test_without_a_seed_each_is_another(engine: LLMEngine) -> None:
    one, other = run(engine, *(request_of(name, temperature=2.0, max_tokens=16) for name in "ab"))
    assert tokens_of(one) != tokens_of(other)


def test_an_id_is_free_again_when_its_request_has_ended(engine: LLMEngine) -> None:
    for _ in range(2):
        run(engine, request_of("again"))
    engine.submit(request_of("twice", max_tokens=40))
    with pytest.raises(GenerationError, match="'twice' is still in progress") as caught:
        engine.submit(request_of("twice"))
    assert caught.value.parameter == "request_id"
    engine.abort("twice")
    assert list(engine.stream("twice"))[-1].finish_reason in ("abort", "length")


def test_who_leaves_a_stream_frees_its_pages(engine: LLMEngine) -> None:
    engine.submit(request_of("left", max_tokens=40))
    stream = engine.stream("left")
    next(stream)
    stream.close()
    run(engine, request_of("after"))
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.used_pages == 0


def test_a_client_that_got_the_last_token_sees_the_statistics_of_its_step(idle: LLMEngine) -> None:
    loop, used_pages = idle._loop, list[int]()

    def put(events: Any) -> None:
        used_pages.append(loop.stats.used_pages)

    loop._put = put
    loop.begin(loop.work_factory.create(request_of("one", max_tokens=2), lambda update: None))
    while loop.has_work:
        loop.turn()
    assert used_pages[-1] == loop.stats.used_pages == 0


def test_threads_draw_distinct_seeds() -> None:
    """All that one thread would draw, in some order: NumPy's generators lock themselves."""
    loops = [LLMEngine(TinyCheckpoint(), dataclasses.replace(CONFIG, seed=5))._loop for _ in range(2)]

    def seeds(loop: Any, count: int) -> list[tuple[int, ...]]:
        create = loop.work_factory.create
        works = [create(request_of("any", temperature=1.0), lambda update: None) for _ in range(count)]
        packed = jnp.stack([work.continuations[0].settings for work in works])
        return list(map(tuple, np.asarray(SamplingSettings.unpacked(packed).seed).tolist()))

    found: list[tuple[int, ...]] = []
    threads = [threading.Thread(target=lambda: found.extend(seeds(loops[0], 50))) for _ in range(8)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert sorted(found) == sorted(seeds(loops[1], 400))
    assert len(set(found)) == 400


def test_a_request_whose_last_token_was_read_cannot_be_aborted_any_more(idle: LLMEngine) -> None:
    loop, told = idle._loop, list[GenerationUpdate]()
    idle._dispatcher = Dispatcher(on_stop=idle._stop, on_end=lambda _: None)
    loop._put = idle._dispatcher.put
    create = loop.work_factory.create
    short, long = create(request_of("short", max_tokens=1), told.append), create(request_of("long"), told.append)
    loop.begin(short)
    loop.begin(long)
    loop.turn()
    loop.turn()  # reads the first step, and tells of it when the third is started
    loop.end(short, "abort")
    loop.end(long, "abort")
    idle._dispatcher.start()
    idle._dispatcher.close()
    assert [(update.request_id, update.finish_reason) for update in told] == [
        ("short", "length"),
        ("long", None),
        ("long", "abort"),
    ]


def test_a_deadline_ends_a_request_and_no_other(engine: LLMEngine) -> None:
    late, other = run(engine, request_of("late", timeout_s=1e-6), request_of("other"))
    assert late[-1].finish_reason == "deadline" and other[-1].finish_reason == "length"


def test_repeated_steps_give_what_single_ones_give(engine: LLMEngine, single: LLMEngine) -> None:
    wanted = [
        request_of("greedy", max_tokens=40, logprobs=2),
        request_of("drawn", (9, 9), max_tokens=31, temperature=1.5, seed=3, repetition_penalty=1.3, logprobs=1),
        request_of("counted", (4,), max_tokens=17, temperature=1.0, seed=4, frequency_penalty=0.7, min_tokens=5),
        request_of("stopped", (8, 1), max_tokens=40, stop_tokens=tuple(range(10, 14))),
    ]
    found, steps = [], []
    for each in (single, engine):
        before = each.stats().steps
        found.append(run(each, *wanted))
        steps.append(each.stats().steps - before)
    longest = max(len(tokens_of(updates)) for updates in found[0])
    assert steps[1] < longest <= steps[0]
    for alone, repeated in zip(*found, strict=True):
        assert tokens_of(alone) == tokens_of(repeated)
        assert alone[-1].finish_reason == repeated[-1].finish_reason
        single_logprobs, repeated_logprobs = (
            [each for update in updates for each in update.logprobs or ()] for updates in (alone, repeated)
        )
        assert single_logprobs == repeated_logprobs


def test_prompts_of_as_many_tokens_as_there_are_rows_are_no_decoding(engine: LLMEngine) -> None:
    prompt = (3, 1, 4)
    (alone,) = run(engine, request_of("alone", prompt, max_tokens=1))
    wide = LLMEngine(TinyCheckpoint(), dataclasses.replace(CONFIG, max_sequences=16))
    for name in "abc":
        wide.submit(request_of(name, prompt, max_tokens=1))
    with wide:
        assert [tokens_of(list(wide.stream(name))) for name in "abc"] == [tokens_of(alone)] * 3


def test_a_text_that_cannot_be_made_fails_alone(engine: LLMEngine, words: Words) -> None:
    (whole,) = run(engine, request_of("whole"))
    words.broken = tokens_of(whole)[3]
    before = tokens_of(whole)[: tokens_of(whole).index(words.broken)]
    try:
        broken, other = run(engine, request_of("broken"), request_of("fine", (7, 7), max_tokens=1))
    finally:
        words.broken = None
    assert broken[-1].finish_reason == "error" and "no such letter" in str(broken[-1].error)
    assert "".join(update.text for update in broken) == words.decode(before)
    assert other[-1].finish_reason in ("length", "error")
    assert engine.stats().used_pages == 0


def test_texts_are_not_made_on_the_engines_thread(engine: LLMEngine) -> None:
    names = set[str]()

    class Watched(Words):
        def decode(self, ids: Any) -> str:
            names.add(threading.current_thread().name)
            return super().decode(ids)

    with another(engine, TinyCheckpoint(tokenizer=Watched())) as watched:
        run(watched, request_of("watched", stop=("xyz",)))
    assert names == {"stack-text"}


def test_steps_go_on_while_a_text_is_made(engine: LLMEngine) -> None:
    going_on = threading.Event()

    class Slow(Words):
        def decode(self, ids: Any) -> str:
            assert going_on.wait(300)
            return super().decode(ids)

    with another(engine, TinyCheckpoint(tokenizer=Slow())) as slow:
        slow.submit(request_of("slow", max_tokens=20))
        slow.submit(request_of("beside", (4,), max_tokens=20))
        deadline_s = time.monotonic() + 300
        while slow.stats().generated_tokens < 40:
            assert time.monotonic() < deadline_s, "the engine waits for a text"
            time.sleep(0.002)
        going_on.set()
        assert [len(tokens_of(list(slow.stream(name)))) for name in ("slow", "beside")] == [20, 20]


def test_a_few_tokens_at_most_are_computed_behind_a_stop_text(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = run(engine, request_of("to be stopped", max_tokens=40))
    before, step = engine.stats().generated_tokens, engine._programs.step
    monkeypatch.setattr(engine._programs, "step", lambda *given, **more: (time.sleep(0.05), step(*given, **more))[1])
    (updates,) = run(engine, request_of("stopped", max_tokens=40, stop=(Words().decode(tokens_of(whole)[:2]),)))
    assert updates[-1].finish_reason == "stop" and tokens_of(updates) == []
    run(engine, request_of("behind", max_tokens=1))
    deadline_s = time.monotonic() + 60
    while (stats := engine.stats()).running or stats.used_pages:  # the last one's pages are freed behind its answer
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.01)
    assert stats.generated_tokens < before + 40


@pytest.mark.slow
def test_a_token_costs_the_same_processor_time_when_many_wait() -> None:
    """Steps are repeated in one program also while requests wait that could not begin."""
    engine = LLMEngine(TinyCheckpoint(), EngineConfig(max_sequences=8, step_tokens=64, max_waiting=64))
    engine.warm_up()

    def seconds_per_token(requests: int, turn: int) -> float:
        started_s = time.process_time()
        found = run(engine, *(request_of(f"{turn} {requests} {each}", max_tokens=40) for each in range(requests)))
        assert [len(tokens_of(updates)) for updates in found] == [40] * requests
        return (time.process_time() - started_s) / (40 * requests)

    with engine:
        few, many = ([seconds_per_token(requests, turn) for turn in range(12)] for requests in (8, 64))
    assert min(many) <= 1.15 * min(few), (min(few), min(many))


def test_submitting_is_as_quick_when_many_wait() -> None:
    engine = LLMEngine(TinyCheckpoint(), dataclasses.replace(CONFIG, max_waiting=5000))

    def cost_s(first: int) -> float:
        began_s = time.process_time()
        for number in range(first, first + 20):
            engine.submit(request_of(str(number)), lambda _: None)
        return time.process_time() - began_s

    costs_s = [cost_s(first) for first in range(0, 2000, 20)]
    # The least of ten: others hold a search for garbage, or what else the machine does.
    assert min(costs_s[-10:]) < 3 * min(costs_s[:10])


def test_logits_that_are_not_finite_fail_their_request_alone(engine: LLMEngine) -> None:
    params = random_params()
    params["embedding"] = params["embedding"].at[9].set(jnp.nan)
    with another(engine, TinyCheckpoint(read=lambda: params)) as broken:
        bad, good = run(broken, request_of("bad", (1, 9)), request_of("good", (1, 2), logit_bias={9: -100.0}))
        assert bad[-1].finish_reason == "error" and "NaN or infinite" in str(bad[-1].error)
        assert good[-1].finish_reason == "length" and len(tokens_of(good)) == 8


def test_a_full_queue_refuses(cold: LLMEngine) -> None:
    cold.submit(request_of("four", n=4))
    cold.submit(request_of("two", n=2))
    with pytest.raises(EngineBusy, match="6 continuations wait already; max_waiting=6") as caught:
        cold.submit(request_of("more"))
    assert caught.value.retry_after_s > 0


def test_as_many_as_expected_may_wait(cold: LLMEngine) -> None:
    cold.expect(8)
    for name in "abcdefgh":
        cold.submit(request_of(name))
    with pytest.raises(EngineBusy, match="8 continuations wait already; max_waiting=8"):
        cold.submit(request_of("more"))


def test_a_request_larger_than_the_queue_is_taken_where_none_wait(idle: LLMEngine) -> None:
    size = CONFIG.max_waiting + 1
    idle.submit(request_of("large", n=size, max_tokens=1))
    with pytest.raises(EngineBusy, match=f"{size} continuations wait already"):
        idle.submit(request_of("more"))
    with idle:
        assert len(tokens_of(list(idle.stream("large")))) == size


def test_what_was_submitted_before_the_start_is_done_after_it(idle: LLMEngine) -> None:
    idle.submit(request_of("early"))
    with idle:
        assert len(tokens_of(list(idle.stream("early")))) == 8


def test_closing_ends_what_runs_and_refuses_more(idle: LLMEngine) -> None:
    idle.start()
    idle.submit(request_of("unfinished", max_tokens=40))
    idle.close()
    last = list(idle.stream("unfinished"))[-1]
    assert last.finish_reason in ("abort", "length")
    with pytest.raises(EngineStopped, match="closed"):
        idle.submit(request_of("late"))


def test_closing_may_wait_for_what_runs(idle: LLMEngine) -> None:
    idle.start()
    idle.submit(request_of("drained", max_tokens=30))
    idle.close(drain_s=60.0)
    assert len(tokens_of(list(idle.stream("drained")))) == 30


def test_a_failed_engine_tells_everybody(idle: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(idle._programs, "step", fail)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    idle.submit(request_of("one"))
    idle.submit(request_of("two", n=2))
    idle.start()
    assert "the device is gone" in str(list(idle.stream("one"))[-1].error)
    assert [update.finish_reason for update in idle.stream("two")] == ["error", "error"]
    for ask in (lambda: idle.submit(request_of("three")), idle.stats):
        with pytest.raises(EngineStopped, match="the device is gone"):
            ask()
    idle.close()


def test_a_request_that_is_submitted_while_the_engine_fails_is_told(
    idle: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle.submit(request_of("first"))
    failing, check = threading.Event(), idle._check_running

    def fail(*_: object, **__: object) -> None:
        failing.set()
        raise RuntimeError("the device is gone")

    def check_and_dawdle() -> None:  # inside of `submit`, which holds the lock
        check()
        idle.start()
        assert failing.wait(300)
        time.sleep(0.1)

    monkeypatch.setattr(idle._loop, "turn", fail)
    monkeypatch.setattr(idle._loop, "start", fail)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(idle, "_check_running", check_and_dawdle)
    received, ended = list[GenerationUpdate](), threading.Event()
    idle.submit(request_of("second"), lambda update: (received.append(update), ended.set()))
    assert ended.wait(300)
    assert [update.finish_reason for update in received] == ["error"]
    idle.close()  # waits for the thread, whose exception is expected in this test


def test_a_deadline_passes_while_a_step_hangs(idle: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, step = threading.Event(), idle._programs.step
    monkeypatch.setattr(idle._programs, "step", lambda *given, **more: (going_on.wait(300), step(*given, **more))[1])
    idle.submit(request_of("late", timeout_s=0.05))
    with idle:
        assert [update.finish_reason for update in idle.stream("late")] == ["deadline"]
        going_on.set()


def test_closing_an_engine_that_was_never_started_ends_what_waits(idle: LLMEngine) -> None:
    idle.submit(request_of("waiting"))
    idle.close()
    assert [update.finish_reason for update in idle.stream("waiting")] == ["abort"]


def test_new_weights_take_effect_and_old_pages_are_forgotten(idle: LLMEngine) -> None:
    prompt = tuple(range(12))
    with idle:
        (before,) = run(idle, request_of("before", prompt))
        (again,) = run(idle, request_of("again", prompt))
        assert again[-1].cached_tokens == 8
        idle.update_weights(jax.tree.map(lambda leaf: leaf.astype(jnp.float16), random_params(seed=1)))
        (after,) = run(idle, request_of("after", prompt))
        assert after[-1].cached_tokens == 0
        rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float16).astype(jnp.float32), random_params(seed=1))
    with another(idle, TinyCheckpoint(read=lambda: rounded)) as fresh:
        (expected,) = run(fresh, request_of("expected", prompt))
    assert tokens_of(after) == tokens_of(expected) != tokens_of(before)


def test_some_new_weights_are_placed_alone_and_the_others_stay(idle: LLMEngine) -> None:
    new, held = random_params(seed=1), random_params()
    some = {name: new[name] for name in ("head", "embedding")}
    with idle:
        (before,) = run(idle, request_of("before"))
        arrays = jax.tree.leaves(idle._programs._weights.params)
        idle.update_weights(some, version=3)
        assert idle.stats().weights_version == 3
        (after,) = run(idle, request_of("after"))
        stayed = [leaf for leaf in jax.tree.leaves(idle._programs._weights.params) if any(leaf is e for e in arrays)]
        assert len(stayed) == len(arrays) - len(some)
        with pytest.raises(ConversionError, match="is missing"):
            idle.update_weights({})
    with another(idle, TinyCheckpoint(read=lambda: {**held, **some})) as fresh:
        (expected,) = run(fresh, request_of("expected"))
    assert tokens_of(after) == tokens_of(expected) != tokens_of(before)
    assert idle.keeps_missing


def test_other_weights_are_refused_by_name(idle: LLMEngine) -> None:
    params = random_params()
    params["head"] = jnp.zeros((EMBED, VOCAB + 1))
    params["tail"] = params.pop("embedding")
    with pytest.raises(ConversionError) as caught:
        idle.update_weights(params)
    text = str(caught.value)
    assert "['embedding'] is missing" in text and "['tail'] is unknown" in text
    assert f"['head'] has shape ({EMBED}, {VOCAB + 1}); expected ({EMBED}, {VOCAB})" in text


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        (lambda leaf: leaf.delete() or leaf, "was deleted"),
        (lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), "is abstract"),
        (lambda leaf: leaf.astype(jnp.int32), "dtype int32; expected float32"),
        (lambda leaf: 1.0, "is a float"),
    ],
)
def test_weights_that_cannot_be_used_fail_their_caller_alone(engine: LLMEngine, spoilt: Any, says: str) -> None:
    params = random_params()
    params["head"] = spoilt(params["head"])
    with pytest.raises(ConversionError, match=rf"\['head'\] .*{says}"):
        engine.update_weights(params)
    with pytest.raises((GenerationError, TypeError), match="drop"):  # tests check types before
        engine.update_weights(random_params(), kv="drop")  # pyrefly: ignore
    assert len(tokens_of(run(engine, request_of("as before"))[0])) == 8


@pytest.mark.parametrize("kv", ["keep", "recompute", "abort"])
def test_new_weights_reach_requests_that_run_and_tokens_tell_which_drew_them(single: LLMEngine, kv: Any) -> None:
    new, prompt = random_params(seed=1), (1, 2, 3)
    engine = another(single, TinyCheckpoint())
    updates = list[GenerationUpdate]()
    request = request_of("running", prompt, max_tokens=12, timeout_s=60.0)
    work = engine._loop.work_factory.create(request, updates.append)
    engine._work["running"] = work
    engine._dispatcher.start()
    engine._loop.begin(work)
    for _ in range(4):
        engine._loop.turn()
    engine.update_weights(new, version=7, kv=kv)
    while engine._loop.has_work:
        engine._loop.turn()
    engine._dispatcher.close()
    tokens = tokens_of(updates)
    versions = [version for update in updates for version in update.weights_versions]
    assert len(versions) == len(tokens) and updates[-1].finish_reason == ("abort" if kv == "abort" else "length")
    assert versions == sorted(versions) and set(versions) == ({0} if kv == "abort" else {0, 7})
    if kv == "recompute":
        drawn_by_old = versions.count(0)
        with another(single, TinyCheckpoint(read=lambda: new)) as fresh:
            rest = request_of("rest", (*prompt, *tokens[:drawn_by_old]), max_tokens=12 - drawn_by_old)
            assert tokens_of(run(fresh, rest)[0]) == tokens[drawn_by_old:]


@pytest.mark.parametrize("donate", [False, True])
def test_new_weights_take_the_memory_of_one_copy_and_of_one_array_if_they_are_donated(
    idle: LLMEngine, donate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, held_bytes, put = random_params(seed=1), list[int](), jax.device_put
    size_bytes = sum(array.nbytes for array in jax.tree.leaves(new))
    largest_bytes = max(array.nbytes for array in jax.tree.leaves(new))
    gc.collect()
    before_bytes = sum(array.nbytes for array in jax.live_arrays())

    def watched(*given: Any, **more: Any) -> Any:
        array = put(*given, **more)
        held_bytes.append(sum(array.nbytes for array in jax.live_arrays()) - before_bytes)
        return array

    monkeypatch.setattr(jax, "device_put", watched)
    idle.update_weights(new, donate=donate)
    assert max(held_bytes) <= (largest_bytes if donate else size_bytes)
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) - before_bytes == (-size_bytes if donate else 0)
    assert all(array.is_deleted() == donate for array in jax.tree.leaves(new))


def test_memory_holds_the_weights_once() -> None:
    gc.collect()
    before = jax.live_arrays()
    engine = LLMEngine(TinyCheckpoint(), CONFIG)
    gc.collect()
    held_bytes = sum(array.nbytes for array in jax.live_arrays() if all(array is not other for other in before))
    programs = engine._programs
    beside_bytes = sum(array.nbytes for array in jax.tree.leaves((programs._layers, programs.slots)))
    assert held_bytes - beside_bytes == sum(array.nbytes for array in jax.tree.leaves(random_params()))


def test_an_engine_says_what_its_memory_is_for(idle: LLMEngine) -> None:
    params_mb = sum(array.nbytes for array in jax.tree.leaves(random_params())) / 2**20
    assert re.fullmatch(
        rf"parameters {params_mb:.0f} MB, slots \d+ MB, programs, libraries and used pages \d+ MB; the cache grows to "
        rf"\d+ MB for {idle.limits.pages * CONFIG.page_tokens} tokens, set by memory_fraction or pages",
        idle.memory(),
    )


def test_pages_take_memory_as_they_are_used() -> None:
    config = dataclasses.replace(CONFIG, pages=2**16)
    with LLMEngine(TinyCheckpoint(), config) as engine:
        pools = [leaf for leaf in jax.tree.leaves(engine._programs._layers) if leaf.nbytes > 2**20]
        assert sum(pool.nbytes for pool in pools) > 60_000_000
        assert sum(_committed_bytes(pool) for pool in pools) < 2**20
        (updates,) = run(engine, request_of("pages", max_tokens=1))
        assert len(tokens_of(updates)) == 1


def _committed_bytes(array: jax.Array) -> int:
    """Returns the bytes of an array on a CPU that take physical memory, by the kernel's map of pages."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    first = array.unsafe_buffer_pointer() // page_bytes
    count = -(-array.nbytes // page_bytes)
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * count), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * page_bytes


def test_a_cache_of_codes_generates() -> None:
    with LLMEngine(TinyCheckpoint(), dataclasses.replace(CONFIG, cache_dtype="int8")) as engine:
        (updates,) = run(engine, request_of("codes"))
        assert len(tokens_of(updates)) == 8


WIDE = dataclasses.replace(CONFIG, step_tokens=32)
PROMPTS = {"short": (1, 2, 3)} | {f"long {length}": (length // 10,) * length for length in (10, 20, 30, 40)}


def test_requests_are_served_while_other_programs_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    told, release = list[str](), threading.Event()
    monkeypatch.setattr("stack_serve.llm.programs._FIRST_TOKENS", 16)
    engine = LLMEngine(TinyCheckpoint(), WIDE, progress=lambda name, *_: told.append(name))
    programs = engine._programs
    lower = programs._compiled._lower

    def wait_in_background(key: Any) -> Any:
        if threading.current_thread().name == "stack-compile":
            assert release.wait(60)
        return lower(key)

    monkeypatch.setattr(programs._compiled, "_lower", wait_in_background)
    engine.prepare()
    first = set(told)
    assert {name.split()[0] for name in first} == {"admit", "prefill", "sample"} and len(first) == 3
    with engine:
        # One row and few tokens run in the programs of more rows and tokens, which need no compilation.
        short = tokens_of(run(engine, request_of("short", PROMPTS["short"]))[0])
        assert engine.stats().compilations == 0 and set(told) == first
        # More tokens than the first program takes compile their own, before the background does.
        updates = run(engine, *(request_of(name, prompt) for name, prompt in PROMPTS.items()))
        expected = list(map(tokens_of, updates))
        assert expected[0] == short and engine.stats().compilations
        release.set()
        before = engine.stats().compilations
        while engine.stats().programs_to_compile:
            time.sleep(0.01)
        updates = run(engine, *(request_of(f"{name} again", prompt) for name, prompt in PROMPTS.items()))
        assert list(map(tokens_of, updates)) == expected
        assert engine.stats().compilations == before and ("decode", 4) in programs._compiled.programs


def test_a_closed_engine_compiles_no_more(idle: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, release = list[str](), threading.Event()

    class Lowered:
        def compile(self, options: Any) -> None:
            compiled.append(name := threading.current_thread().name)
            assert name != "stack-compile" or release.wait(60)

    programs = idle._programs
    monkeypatch.setattr(programs._compiled, "_lower", lambda key: Lowered())
    idle.prepare()
    closing = threading.Thread(target=idle.close)
    closing.start()
    while programs._compiled._waiting:
        time.sleep(0.01)
    release.set()
    closing.join()
    assert compiled.count("stack-compile") <= 1 and not any(thread.is_alive() for thread in programs._compiled._threads)
