"""`stack rl evaluate`: its figures from known outcomes in NumPy, and its options."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import stack_core.abi.model_formats
from stack_core.abi.plugins import registries
from stack_core.cli import main
from stack_rl.commands import evaluate as command
from stack_rl.commands.evaluate import summarized
from stack_rl.contracts import Trajectory
from stack_rl.environments.cell import CellConfig

from .scripted import END, Policy, ScriptedEngine

OUTCOMES = {0: [1, 0, 0, 0], 1: [1, 1, 1, 1], 2: [0, 0, 0, 0], 3: [1, 1, 0]}  # one attempt at task 3 was dropped
TASKS = CellConfig(held_out=4).build(Policy(), seq_tokens=6, seed=0)


def episodes(*, checked=True):
    return [
        Trajectory(
            group=task,
            task=task,
            tokens=np.asarray([1, 2, 3, END], np.int32),
            sampled=np.asarray([False, False, True, True]),
            logprobs=np.zeros(4, np.float32),
            versions=np.zeros(4, np.int32),
            rewards=np.asarray([0, 0, 0, 0.5 * right], np.float32),
            verdict=("correct" if right else "unparsed") if checked else None,
            facts={"turns": 1.0 + task},
        )
        for task, outcomes in OUTCOMES.items()
        for right in outcomes
    ]


def test_figures_of_known_outcomes():
    found = summarized(episodes(), TASKS, (1, 2, 4))
    shares = np.asarray([0.25, 1.0, 0.0, 2 / 3])
    assert found.means["tasks"] == 4 and found.means["episodes"] == 15
    assert found.means["correct"] == pytest.approx(shares.mean())
    assert found.means["reward"] == pytest.approx(shares.mean() / 2)
    assert found.means["unparsed"] == pytest.approx(1 - shares.mean())
    assert found.means["turns"] == 2.5
    # pass@1 is avg@k; pass@4 has only the three tasks with four attempts.
    assert found.pass_at[1] == pytest.approx(shares.mean())
    assert found.pass_at[2] == pytest.approx(np.mean([1 - 3 / 6, 1, 0, 1]))
    assert found.pass_at[4] == pytest.approx(2 / 3)
    error = (shares / 2).std(ddof=1) / 2
    assert found.intervals["reward"] == pytest.approx(shares.mean() / 2 + np.asarray([-1, 1]) * 1.959964 * error)
    low, high = found.intervals["correct"]
    assert 0 <= low < shares.mean() < high <= 1
    last = found.tasks[3]
    assert (last.task, last.attempts, last.correct, last.unparsed, last.tokens) == ("cell held out 3", 3, 2, 1, 2.0)


def test_an_action_with_a_limit_of_one_token_is_not_truncated():
    for starts, truncated in (((2, 3), 0.0), ((2,), 1.0)):
        found = [replace(each, is_cut=True, action_starts=starts) for each in episodes()]
        assert summarized(found, TASKS, (1,)).means["truncated"] == truncated


def test_without_verdicts_there_is_no_pass_at_k():
    found = summarized(episodes(checked=False), TASKS, (1, 2))
    assert found.pass_at == {} and "correct" not in found.intervals and found.tasks[0].correct is None
    assert found.means["reward"] > 0


RECIPE = """
data:
  name: rollouts
  environment: {name: prompts, source: SOURCE, held_out: SOURCE, rewards: [exact], max_tokens: 4}
  seq_tokens: 16
  groups: 2
  group_size: 3
  engine: scripted
  min_p: 0.25
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe of three tasks, and the requests of an engine that knows the first answer, and sometimes the second."""
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in ("a", "bb", "cc"))
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("SOURCE", str(tmp_path / "tasks.jsonl")))
    asked = []

    def answer(prompt):
        asked.append(prompt)
        is_right = len(prompt) == 2 or (prompt[-1] == ord("b") and len(asked) % 2)
        return (ord("x" if is_right else "y"), END)

    engine = ScriptedEngine(answer)
    monkeypatch.setattr(
        command, "registries", SimpleNamespace(data=registries.data, engines={"scripted": lambda _: engine})
    )
    monkeypatch.setattr(stack_core.abi.model_formats, "open_for_generation", lambda run: Policy())
    return file, engine


def test_the_command_samples_attempts_and_prints_a_table_or_json(recipe, capsys):
    file, engine = recipe
    main(["rl", "evaluate", str(file), "run", "--attempts", "4", "--k", "1", "4", "--per-task", "--temperature", "0.5"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["task", "correct", "reward", "tokens", "unparsed", "truncated"]
    assert lines[1].split()[-5:] == ["4/4", "1", "2", "0", "0"] and lines[2].split()[-5] == "2/4"
    assert lines[4].startswith("tasks 3, episodes 12, reward 0.5 (") and "avg@4 0.5 (" in lines[4]
    assert lines[4].endswith("pass@1 0.5, pass@4 0.6667")
    assert {(each.sampling.temperature, each.sampling.min_p) for each in engine.requests} == {(0.5, 0.25)}
    assert len({each.sampling.seed for each in engine.requests}) == 12
    engine.requests.clear()
    main(["rl", "evaluate", str(file), "run", "--attempts", "4", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found["pass_at"]) == ["1", "2", "4"] and found["tasks"] == 3
    assert [each["correct"] for each in found["per_task"]] == [4, 2, 0]


def test_one_attempt_is_greedy(recipe, capsys):
    file, engine = recipe
    main(["rl", "evaluate", str(file), "run", "--samples", "1"])
    *samples, line = capsys.readouterr().out.splitlines()
    assert len(samples) == 1 and line.startswith("tasks 3, episodes 3, reward ") and "correct " in line
    assert {each.sampling.temperature for each in engine.requests} == {0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attempts", "0"), "--attempts is 0"),
        (("--attempts", "4", "--temperature", "0"), "all 4 attempts at a task would be the same"),
        (("--attempts", "4", "--k", "8"), "--k is 8; pass@k needs 1 <= k <= 4. Raise --attempts"),
        (("--temperature", "-1"), "--temperature is -1.0"),
    ],
)
def test_contradictory_options_are_refused(recipe, options, message, capsys):
    with pytest.raises(SystemExit):
        main(["rl", "evaluate", str(recipe[0]), "run", *options])
    assert message in capsys.readouterr().err


def test_a_recipe_without_held_out_tasks_is_refused(recipe, capsys):
    file, _ = recipe
    file.write_text(RECIPE.replace(", held_out: SOURCE", "").replace("SOURCE", str(file.parent / "tasks.jsonl")))
    with pytest.raises(SystemExit):
        main(["rl", "evaluate", str(file), "run"])
    assert "no held-out tasks" in capsys.readouterr().err
