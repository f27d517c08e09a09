"""Execution of tools: state of an episode, time limits, and processes that are killed."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_rl.environments.tools import ToolsConfig
from stack_rl.episodes import Attempt, Player
from stack_rl.experience import batch_of, batch_shapes, credited
from stack_rl.objectives.ppo import PPOConfig

from ..scripted import END, ScriptedEngine
from .playing import policy

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\x00\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MODULE = """
import asyncio, os, subprocess, time
from pathlib import Path

def add(first: int, second: int = 1) -> int:
    "Adds numbers."
    print("adding")
    return first + second

async def later(x: int) -> str:
    await asyncio.sleep(0)
    return f"{x} later"

def hang(path: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(f"{os.getpid()} {child.pid}")
    while True:
        pass

async def wait(x: int) -> None:
    await asyncio.sleep(600)

def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"

def leave(code: int) -> None:
    os._exit(code)

def late() -> None:
    raise TimeoutError("the server is late")

class Counter:
    def __init__(self) -> None:
        self.count = 0

    def raise_count(self, by: int = 1) -> str:
        "Raises the count."
        self.count += by
        return f"count {self.count}"

    async def freeze(self) -> None:
        await asyncio.sleep(600)

    def close(self) -> None:
        with open(os.environ["CLOSED"], "a") as file:
            file.write(f"{self.count};")

    def _hidden(self) -> None: ...
"""
ISOLATIONS = pytest.mark.parametrize("isolation", ["process", "thread"])


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """A module that another process can import, with a name of its own."""
    name = f"tools_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    return name


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(tmp_path, tools, *scripts, **fields):
    """Plays an episode for each script, all at once, and returns their texts and trajectories."""
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"prompt": [{"role": "user", "content": "go"}], "answer": "done"}))
    config = ToolsConfig(source=str(records), rewards=("exact",), tools=tools, **{"max_tokens": 200, **fields})
    config.check(None)
    tasks = config.build(policy(TEMPLATE), seq_tokens=1500, seed=0)
    turns = [iter(script) for script in scripts]
    order = iter([turn for _ in range(10) for turn in turns])
    engine = ScriptedEngine(lambda prompt: (*map(ord, next(next(order))), END))
    found = Player(tasks, engine, seq_tokens=1500, on_failure="stop", timeout_s=100.0).play(
        [Attempt(0, 0)] * len(scripts), seed=(0,), greedy=False
    )
    return [(tasks.text(tuple(each.tokens.tolist())), each) for each in found if each is not None]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()  # a zombie has ended


def test_a_tool_that_hangs_is_killed_with_its_children_and_the_episode_continues(tmp_path, module):
    pids = tmp_path / "pids"
    tools = (f"{module}:hang", f"{module}:add")
    script = [call("hang", path=str(pids)), call("add", first=2), "done"]
    ((text, found),) = play(tmp_path, tools, script, tool_timeout_s=3.0)
    assert "<tool>Error: 'hang' did not return within 3 s.\x00" in text and "<tool>3\x00" in text
    assert found.rewards.sum() == 1.0 and found.facts["tool_timeouts"] == 1.0 and found.facts["calls"] == 2.0
    until_s = time.monotonic() + 20
    running = list(map(int, pids.read_text().split()))
    while any(map(is_running, running)) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert len(running) == 2 and not any(map(is_running, running))


@ISOLATIONS
def test_a_tool_that_waits_for_ever_is_an_error_that_the_policy_sees(tmp_path, module, isolation):
    script = [call("wait", x=1), "done"]
    ((text, found),) = play(tmp_path, (f"{module}:wait",), script, tool_timeout_s=0.5, isolation=isolation)
    assert "<tool>Error: 'wait' did not return within 0.5 s.\x00" in text and found.verdict == "correct"
    blocked = [call("sleep", seconds=30), "done"]
    ((text, found),) = play(tmp_path, (f"{module}:sleep",), blocked, tool_timeout_s=0.5, isolation=isolation)
    assert "'sleep' did not return within 0.5 s" in text and found.facts["tool_timeouts"] == 1.0


@ISOLATIONS
def test_results_and_errors_are_text(tmp_path, module, isolation):
    tools = tuple(f"{module}:{name}" for name in ("add", "later", "late"))
    script = [call("add", first=2, second=3), call("later", x=4), call("add"), call("late"), call("sub"), "done"]
    ((text, found),) = play(tmp_path, tools, script, isolation=isolation, max_turns=9)
    assert "<tool>5\x00" in text and "<tool>4 later\x00" in text and "<tool>Error: TypeError: add() missing" in text
    assert "<tool>Error: TimeoutError: the server is late\x00" in text and "no such call (KeyError: 'sub')" in text
    assert (found.verdict, found.parsed) == ("correct", "done") and found.facts["tool_timeouts"] == 0.0


@ISOLATIONS
def test_episodes_do_not_share_the_state_of_their_tools(tmp_path, module, isolation):
    up = call("raise_count")
    scripts = [[up, up, "done"], [call("raise_count", by=5), up, "done"]]
    ((first, _), (second, _)) = play(tmp_path, (f"{module}:Counter",), *scripts, isolation=isolation)
    assert "[freeze][raise_count]<user>" in first, "private methods and close are no tools"
    assert "<tool>count 1\x00" in first and "<tool>count 2\x00" in first
    assert "<tool>count 5\x00" in second and "<tool>count 6\x00" in second
    assert sorted((tmp_path / "closed").read_text().split(";")) == ["", "2", "6"], "each was closed at its end"


def test_a_process_is_used_again_with_new_state(tmp_path, module):
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"prompt": "go", "answer": "done"}))
    config = ToolsConfig(
        source=str(records), rewards=("exact",), tools=(f"{module}:Counter",), max_tokens=200, tool_timeout_s=20.0
    )
    tasks = config.build(policy(TEMPLATE), seq_tokens=1500, seed=0)
    answers = iter([call("raise_count"), "done", call("raise_count"), "done"])
    engine = ScriptedEngine(lambda prompt: (*map(ord, next(answers)), END))
    player = Player(tasks, engine, seq_tokens=1500, on_failure="stop")
    for _ in range(2):
        (found,) = player.play([Attempt(0, 0)], seed=(0,), greedy=False)
        assert "<tool>count 1\x00" in tasks.text(tuple(found.tokens.tolist()))


@ISOLATIONS
def test_tools_whose_call_hung_start_again_without_their_state(tmp_path, module, isolation):
    up = call("raise_count")
    fields = {"tool_timeout_s": 3.0, "isolation": isolation, "max_turns": 9}
    ((text, found),) = play(tmp_path, (f"{module}:Counter",), [up, up, call("freeze"), up, "done"], **fields)
    assert "'freeze' did not return within 3 s. The tools start again and have lost their state.\x00" in text
    assert text.count("<tool>count 1\x00") == 2 and "count 2" in text and found.verdict == "correct"


def test_a_tool_that_ends_its_process_is_an_error(tmp_path, module):
    tools = (f"{module}:leave", f"{module}:add")
    ((text, found),) = play(tmp_path, tools, [call("leave", code=3), call("add", first=1), "done"])
    assert "<tool>Error: 'leave' ended its process.\x00" in text and "<tool>2\x00" in text
    assert found.verdict == "correct"


def test_the_time_limit_of_a_call_does_not_include_its_wait_for_others(tmp_path, module):
    script = [call("sleep", seconds=1.5), "done"]
    fields = {"tool_timeout_s": 4.0, "calls_at_once": 1}
    found = play(tmp_path, (f"{module}:sleep",), script, script, script, **fields)
    assert all("<tool>awake\x00" in text and each.facts["tool_timeouts"] == 0.0 for text, each in found)


def worked(completion):
    """A reward of a step: 0.5 for each call that did not fail."""
    results, calls = completion.record["tool_results"], completion.record["tool_calls"]
    assert len(results) == len(calls) and completion.text.startswith("<tool_call>") and completion.record["answer"]
    return 0.5 * sum("Error" not in each for each in results)


def test_a_step_s_reward_reaches_the_tokens_of_its_message(tmp_path, module):
    script = [call("add", first=1) + call("add", first=2), call("add"), "done"]
    fields = {"step_rewards": ({"reward": worked, "weight": 3},), "max_tokens": 300, "isolation": "thread"}
    ((_, found),) = play(tmp_path, (f"{module}:add",), script, **fields)
    ends = [place for place, token in enumerate(found.tokens) if token == END and found.sampled[place]]
    assert found.rewards[ends].tolist() == [3.0, 0.0, 1.0] and found.rewards.sum() == 4.0
    assert found.facts["step.worked"] == 1.0 and found.facts["calls"] == 3.0 and found.verdict == "correct"

    shapes = batch_shapes(1, len(found.tokens), PPOConfig())
    batch = batch_of([found], shapes=shapes, version=0)
    scores = {"values": np.zeros(batch["targets"].shape, np.float32), "policy_logprobs": batch["behaviour_logprobs"]}
    settings = PPOConfig(gae_lambda=1.0, gae_gamma=1.0, kl=0.0, whiten_advantages=False)
    returns = credited(batch, [found], settings, scores)["returns"][0]
    first, second, third = (returns[place - 1] for place in ends)
    assert (first, second, third) == (4.0, 1.0, 1.0), "a message is credited with its own reward and later ones"


def test_an_episode_that_ends_at_its_last_call_has_the_step_s_reward(tmp_path, module):
    fields = {"step_rewards": (worked,), "isolation": "thread", "max_turns": 1}
    ((_, found),) = play(tmp_path, (f"{module}:add",), [call("add", first=1)], **fields)
    assert found.rewards.sum() == 0.5 and found.facts["step.worked"] == 0.5 and found.facts["calls"] == 1.0


def test_what_a_process_cannot_import_is_refused(tmp_path, module):
    with pytest.raises(ConfigError, match=r"another process cannot import as .*isolation: thread"):
        play(tmp_path, (lambda x: x,), ["done"])
    with pytest.raises(ConfigError, match="'Empty' has no public method"):
        play(tmp_path, (type("Empty", (), {}),), ["done"])


def test_a_process_that_cannot_import_the_tools_is_named(tmp_path, module, monkeypatch):
    __import__(module)
    (tmp_path / f"{module}.py").write_text("raise RuntimeError('only once')")
    with pytest.raises(EnvironmentFailed, match="cannot import them: RuntimeError: only once"):
        play(tmp_path, (f"{module}:add",), [call("add", first=1), "done"])
