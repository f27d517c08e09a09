"""A capture of a server has its requests and engine steps, and one of post-training its rollouts and rewards."""

import asyncio
import dataclasses
import re
import threading

import httpx2
import jax
import numpy as np
import pytest

import stack_profile
from stack_core.cli import main
from stack_profile.analyses.requests import requests
from stack_profile.analyses.rollouts import rollouts
from stack_profile.exports import write
from stack_profile.report.events import recorded_events
from stack_profile.report.page import Section, page
from stack_profile.traces.short_paths import short_paths
from stack_profile.traces.trace import load_trace
from stack_profile.traces.work_spans import requests_of, work_spans
from stack_rl.contracts import Completion, Observation, StepResult
from stack_rl.episodes import Attempt, Episode
from stack_rl.rewards.weighted import total_score
from stack_serve.http.server import HttpServer, listen
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.lifecycle import OpenAIApp
from stack_serve.openai.service import Service
from stack_train.generation.generative import generative_checkpoint
from stack_train.models.llama import FAMILY, LlamaConfig
from stack_train.run.train import train

from .served import write_tokenizer
from .test_rollouts import cell, records

CONFIG = LlamaConfig(vocab_size=320, embed=16, layers=1, heads=2, kv_heads=1, mlp=24, max_positions=64, dtype="float32")
# The third request waits until one of the others has ended; the second one's prompt takes two steps.
SIZES = EngineConfig(max_sequences=2, step_tokens=8, page_tokens=4, decode_repeats=1, prefix_caching=False)
PROMPTS, ANSWERS = ((5, 6, 7), tuple(range(5, 17)), (9, 8)), (12, 4, 3)
COUNTERS = ("prompt_tokens", "generation_tokens", "engine_steps", "request_success", "time_to_first_token_seconds_sum")


def counters(client):
    """Sums of the server's counters by name."""
    text = client.get("/metrics").text
    return {
        name: sum(float(value) for value in re.findall(rf"^\w+:{name}(?:_total)?{{.*}} (\S+)$", text, re.MULTILINE))
        for name in COUNTERS
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The trace of three requests to a server, and what its counters say of them."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tokenizer(directory)
    model = jax.jit(lambda: FAMILY.build(CONFIG, key=jax.random.key(0)))()
    checkpoint = generative_checkpoint(model, CONFIG, name="tiny", tokenizer=directory, origin=None)
    options, ready = OpenAIConfig(port=0, drain_s=1.0), threading.Event()
    listener = listen(options)
    host, port = listener.getsockname()[:2]
    app = OpenAIApp(Service(checkpoint, options), lambda: LLMEngine(checkpoint, SIZES))
    http = HttpServer(app, listener, options, announce=lambda _: ready.set())
    serving = threading.Thread(target=http.run)
    serving.start()
    try:
        assert ready.wait(300)
        with httpx2.Client(base_url=f"http://{host}:{port}", timeout=120) as client:

            def ask(prompt, tokens):
                body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
                assert "[DONE]" in client.post("/v1/completions", json=body).text

            before = counters(client)
            with stack_profile.capture(directory / "out", stacks_hz=0.0) as capture:
                asking = [threading.Thread(target=ask, args=each) for each in zip(PROMPTS, ANSWERS, strict=True)]
                for each in asking:
                    each.start()
                for each in asking:
                    each.join()
            after = counters(client)
    finally:
        http.drain()
        serving.join(60)
    return load_trace(capture.wait()), {name: after[name] - before[name] for name in COUNTERS}


@pytest.mark.slow  # compiles the programs of an engine
def test_requests_and_their_counts_are_those_of_the_server(served):
    trace, counts = served
    answer = requests(trace)
    facts = answer.facts
    assert (facts["requests"], facts["finished"]) == (3, counts["request_success"]) == (3, 3)
    assert facts["prompt_tokens"] == counts["prompt_tokens"] == sum(map(len, PROMPTS))
    assert facts["generated_tokens"] == counts["generation_tokens"] == sum(ANSWERS)
    assert facts["engine_steps"] == counts["engine_steps"]
    assert sorted((row.prompt_tokens, row.generated_tokens) for row in answer.rows) == sorted(
        zip(map(len, PROMPTS), ANSWERS, strict=True)
    )
    # The server takes the time just before the update is delivered, the mark just after.
    first_token_s = sum(row.first_token_s for row in answer.rows)
    assert first_token_s == pytest.approx(counts["time_to_first_token_seconds_sum"], abs=0.03)
    assert {row.end for row in answer.rows} == {"length"} and answer.notes == ()


@pytest.mark.slow
def test_a_request_is_queued_then_prefilled_then_decoded(served):
    trace, _ = served
    found = requests_of(work_spans(trace.spaces[0], trace.base_ns))
    for each in found:
        phases = ["prefill" if prompt else "decode" for _, prompt, _ in each.steps]
        assert phases == sorted(phases, reverse=True) and set(phases) == {"prefill", "decode"}
        times = [each.queue.start_ps, each.queue.end_ps, each.first_token_ps, each.first_sent_ps, each.end_ps]
        assert times == sorted(times)
        assert sum(tokens for _, tokens in each.sent) == each.generated_tokens
    long = next(each for each in found if each.queue.fields["prompt_tokens"] == 12)
    assert next(prompt for _, prompt, _ in long.steps if prompt) < 12, "its prompt takes several steps"
    # Two of three requests run at once.
    assert (
        max(len(span.fields["rows"]) for span in work_spans(trace.spaces[0], trace.base_ns) if "rows" in span.fields)
        == 2
    )


@pytest.mark.slow
def test_the_page_shows_the_lanes(browser, served, tmp_path):
    trace, _ = served
    section = Section("requests", "", requests(trace))
    write([page(trace, [section])], tmp_path / "report.html")
    lanes = recorded_events(trace, short_paths(trace)).lanes
    places = {lane.name: sum(map(len, lanes[:place])) for place, lane in enumerate(lanes) if lane.type == "work"}
    assert places.keys() == {"engine steps", "requests"}
    for name, event in places.items():
        browser.open(tmp_path / "report.html", f"#event={event}&tab=event")
        lane = browser.values(".panel .facts dd", "each.textContent")[1]
        assert lane.endswith(f", {name}")
    browser.open(tmp_path / "report.html", "#tab=more&section=requests")
    names = browser.values(".panel .analysis tbody tr", "each.cells[0].textContent")
    assert names == [row.name for row in requests(trace).rows]
    # A click on a row selects the request's time.
    address = browser.changed(lambda: browser.evaluate("document.querySelector('.panel .analysis tbody a').click()"))
    start, end = (int(each) for each in re.search(r"[#&]s=(\d+)-(\d+)", address).groups())
    assert (end - start) * 1e-12 == pytest.approx(requests(trace).rows[0].duration_s, rel=1e-6)
    assert browser.complaints == []


class Silent:
    """An environment of one turn without a prompt."""

    async def reset(self):
        return Observation(tokens=(1, 2, 3), max_tokens=4)

    async def step(self, action):
        return StepResult(reward=0.0, observation=None)

    async def close(self):
        pass


def half(completion):
    return 0.5


def test_rollouts_and_rewards_are_in_the_trace(capsys, tmp_path):
    episode = Episode(Attempt(group=2, task=7), Silent())
    branch = episode.branches[0]
    branch.observe((1, 2, 3))

    async def play():
        completion = Completion(text="a", tokens=(4,), prompt="", record={}, is_finished=True)
        score = await total_score([("half", half, 1.0)], completion)
        branch.rewards[-1] += score.value
        await episode.close()

    with stack_profile.capture(tmp_path / "out", stacks_hz=0.0) as capture:
        asyncio.run(play())
    trace = load_trace(capture.wait())
    answer = rollouts(trace, by="episode")
    (row,) = answer.rows
    assert (row.name, row.tokens, row.reward, row.failure) == ("group 2, task 7, episode 1", 3, 0.5, "")
    assert row.duration_s > 0 and answer.facts["rewards"] == 1
    (group,) = rollouts(trace).rows
    assert (group.name, group.episodes, group.reward, group.duration_s) == ("group 2, task 7", 1, 0.5, row.duration_s)
    assert requests(trace).rows == () and "no events of a server" in requests(trace).notes[0]
    main(["profile", "rollouts", str(tmp_path / "out")])
    assert "group 2, task 7" in capsys.readouterr().out


@pytest.mark.slow  # trains on rollouts
def test_a_run_of_grpo_has_the_episodes_of_its_steps(browser, tmp_path):
    sizes = ("data.groups=4", "data.group_size=16", "run.steps=5", "run.evaluate_every_steps=0")
    train(cell(tmp_path / "run", *sizes, "checkpoint.every_steps=0", "profile.first_step=2", "profile.steps=2"))
    trace = load_trace(tmp_path / "run" / "profile")
    answer, episodes = rollouts(trace), rollouts(trace, by="episode")
    assert len(episodes.rows) == answer.facts["rollouts"] == sum(row.episodes for row in answer.rows)
    # The data of the next step is played while a step is dispatched, so the capture begins with the third.
    metrics = {record["step"]: record for record in records(tmp_path / "run", "train")}
    compared = set()
    for step in metrics:
        names = {f"group {group}, task {group}" for group in range(4 * (step - 1), 4 * step)}
        rows = [row for row in answer.rows if row.name in names and row.episodes == 16]
        if len(rows) == 4:
            compared.add(step)
            assert np.mean([row.reward for row in rows]) == pytest.approx(metrics[step]["reward"])
            assert np.mean([row.lowest == row.highest for row in rows]) == metrics[step]["flat_groups"]
            assert sum(row.tokens for row in rows) >= metrics[step]["action_tokens"] * 64
    assert 3 in compared
    recorded = recorded_events(trace, short_paths(trace))
    lanes = {lane.name: lane for lane in recorded.lanes if lane.type == "work"}
    assert {"trainer steps", "rollouts"} <= lanes.keys()
    # 64 episodes at once would fill the screen, so the lane has their groups.
    assert lanes["rollouts"].rows <= 8 and len(lanes["rollouts"]) == answer.facts["groups"]
    names = {recorded.kinds[kind]["name"].partition(":")[0] for kind in lanes["rollouts"].kind.tolist()}
    assert names == {row.name for row in answer.rows}
    write([page(trace, [Section("rollouts", "", answer)])], tmp_path / "report.html")
    browser.open(tmp_path / "report.html", "#tab=more&section=rollouts")
    cells = browser.values(".panel .analysis tbody tr", "[...each.cells].map(cell => Number(cell.dataset.value))")
    assert [row[1:] for row in cells] == [list(dataclasses.astuple(row)[1:]) for row in answer.rows]
    assert browser.complaints == []
