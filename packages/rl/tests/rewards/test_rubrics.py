"""Rubrics, and judges that compare two answers."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_rl.contracts import Completion, Score, Trajectory
from stack_rl.environments.prompts import PromptsConfig
from stack_rl.environments.tools import ToolsConfig
from stack_rl.experience import batch_of
from stack_rl.objectives.presets import GRPOConfig
from stack_rl.reward_parts import reward_names
from stack_rl.rewards.pairwise import PairwiseConfig
from stack_rl.rewards.rubric import RubricConfig
from stack_rl.rewards.unchecked import Unchecked
from stack_rl.rewards.weighted import check_reward, resolved, total_score
from stack_rl.rollouts import PolicyRollouts, RolloutData


def scored(reward, text="42", **record) -> Score:
    completion = Completion(prompt="6 * 7?", text=text, tokens=(1,), is_finished=True, record=record)
    return asyncio.run(total_score([(*resolved(reward), 1.0)], completion))


def brief(completion):
    return Score(value=1 / len(completion.text), facts={"length": len(completion.text)})


def lower(completion):
    return float(completion.text.islower())


RUBRIC = {
    "name": "rubric",
    "criteria": {
        "right": {"reward": "exact", "weight": 2},
        "close": {"reward": {"name": "math", "tolerance": 0.5, "library": "none"}, "weight": -0.5},
        "value": {"name": "math", "library": "none"},
        "brief": brief,
    },
}


def test_a_rubric_is_the_weighted_sum_of_its_criteria_and_each_is_a_fact():
    found = scored(RUBRIC, "40", answer="42")
    assert found.value == 2 * 0 - 0.5 * 1 + 1 * 0 + 0.5
    facts = {"right": 0.0, "close": 1.0, "value": 0.0, "brief": 0.5, "brief.length": 2.0}
    assert found.facts == {"rubric": 0.0, **facts} and found.verdict == "wrong"
    assert scored({**RUBRIC, "normalize": True}, "42", answer="42").value == (2 - 0.5 + 1 + 0.5) / 4.5
    assert scored({**RUBRIC, "verdict_of": "close"}, "40", answer="42").verdict == "correct"
    found = scored({**RUBRIC, "verdict_of": "close"}, "answer: 40", answer="42")
    assert (found.verdict, found.parsed) == ("correct", "40"), "of the same criterion"


def test_a_required_criterion_gates_the_reward():
    rubric = {"name": "rubric", "criteria": {"right": "exact", "lower": {"reward": lower, "weight": 0}}}
    assert scored({**rubric, "required": ["lower"]}, "ok", answer="ok").value == 1.0
    found = scored({**rubric, "required": ["lower"]}, "OK", answer="OK")
    assert found.value == 0.0 and found.facts["right"] == 1.0
    assert scored(rubric, "OK", answer="OK").value == 1.0


def test_a_rubric_that_cannot_be_is_refused():
    criteria = {"right": "exact"}
    for settings, message in [
        ({"criteria": criteria, "required": ["wrong"]}, "names 'wrong'; its criteria are right"),
        ({"criteria": criteria, "verdict_of": "wrong"}, "names 'wrong'"),
        ({"criteria": {"right": {"reward": "exact", "weight": 0}}, "normalize": True}, "weights are all 0"),
        ({"criteria": {"right": "no_module:f"}}, "cannot be imported"),
        ({"criteria": {}}, "criteria"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_reward({"name": "rubric", **settings})
    config = parse(RubricConfig, {"criteria": criteria})
    assert parse(RubricConfig, to_mapping(config)) == config


class Chat(BaseHTTPRequestHandler):
    reply = staticmethod(lambda question: "")
    asked: list = []  # noqa: RUF012  # of the one server that a test has

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        self.asked.append(body)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": self.reply(question)}}]}).encode())

    def log_message(self, *_): ...


@pytest.fixture
def chat():
    Chat.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def longer(question: str) -> str:
    """Prefers the longer answer."""
    first, second = question.split("Answer A:\n")[1].split("\nAnswer B:\n")
    sizes = len(first.strip()), len(second.strip())
    return f"Hm.\nBetter: {'tie' if sizes[0] == sizes[1] else 'A' if sizes[0] > sizes[1] else 'B'}"


@pytest.mark.parametrize(
    ("reply", "text", "value", "consistent"),
    [
        (longer, "a long answer", 1.0, 1.0),
        (longer, "x", 0.0, 1.0),
        (longer, "same", 0.5, 1.0),
        (lambda question: "Better: A", "any", 0.5, 0.0),
        (lambda question: "Better: a tie", "any", 0.5, 1.0),
        (lambda question: "Better: A? no.\n**Better:** answer B", "all", 0.5, 0.0),
    ],
)
def test_a_judge_compares_in_both_orders(chat, monkeypatch, reply, text, value, consistent):
    monkeypatch.setattr(Chat, "reply", staticmethod(reply))
    found = scored({"name": "pairwise", "url": chat, "model": "m", "seed": 5}, text, answer="1234")
    assert found.value == value and found.facts == {"pairwise": value, "consistent": consistent}
    assert len(Chat.asked) == 2 and {each["seed"] for each in Chat.asked} == {5}


def test_the_other_answer_and_the_question_are_of_the_record(chat, monkeypatch):
    monkeypatch.setattr(Chat, "reply", staticmethod(lambda question: "Better: tie"))
    question = "{prompt}|{first}|{second}|{topic}"
    config = PairwiseConfig(url=chat, model="m", against="baseline", question=question)
    assert scored(config, "ours", baseline="theirs", topic="sums").value == 0.5
    contents = [each["messages"][0]["content"] for each in Chat.asked]
    assert contents == ["6 * 7?|ours|theirs|sums", "6 * 7?|theirs|ours|sums"]
    for record, message in [
        ({"answer": "1"}, "the record lacks 'baseline'"),
        ({"baseline": "1"}, "KeyError: 'topic'"),
        ({"baseline": "1", "first": "2"}, "field 'first' has a name that the question of 'pairwise' uses"),
    ]:
        with pytest.raises(EnvironmentFailed, match=message):
            scored(config, "ours", **record)


def test_a_judge_without_a_preference_gives_none(chat, monkeypatch):
    monkeypatch.setattr(Chat, "reply", staticmethod(lambda question: "Both are better than a bad one."))
    with pytest.raises(Unchecked, match="no preference in the judge's answer 'Both"):
        scored({"name": "pairwise", "url": chat, "model": "m"}, answer="1")
    found = scored({"name": "pairwise", "url": chat, "model": "m", "unchecked": "wrong"}, answer="1")
    assert found.value == 0.0 and found.verdict == "unparsed"


def test_settings_of_pairwise_that_do_not_fit_are_refused():
    for settings, message in [
        ({"url": "localhost"}, "must begin with http"),
        ({"url": "http://x", "question": "{first}"}, r"required: \{first\} and \{second\}"),
        ({"url": "http://x", "question": "{first} {second} {"}, "Write braces twice"),
    ]:
        with pytest.raises(ConfigError, match=message):
            PairwiseConfig(model="m", **settings)


def test_the_names_of_rewards_that_a_check_refuses_are_no_error(tmp_path):
    rewards = ({"tolerance": 0.5}, {"name": "rubric", "criteria": None})
    data = RolloutData(environment=PromptsConfig(source=str(tmp_path / "none"), rewards=rewards), seq_tokens=4)
    assert {"reward.", "reward.rubric"} < set(PolicyRollouts(data, GRPOConfig()).shapes(2, None))
    with pytest.raises(ConfigError, match="without a name"):
        data.environment.check(None)


def test_the_parts_of_a_reward_are_rows_of_a_batch_and_so_metrics(tmp_path):
    rubric = {"name": "rubric", "criteria": {"right": "exact", "short": brief}}
    rewards = ({"reward": rubric, "weight": 2}, brief, "operator:neg", "run:runs/reward")
    fields = {"source": str(tmp_path / "none"), "rewards": rewards}
    assert reward_names(PromptsConfig(**fields)) == ["rubric", "right", "short", "brief", "neg", "run:runs/reward"]
    tools = ToolsConfig(**fields, tools=(brief,), step_rewards=(RubricConfig(criteria={"a": "exact"}),))
    assert reward_names(tools)[-2:] == ["step.rubric", "step.a"] and reward_names(object()) == []
    shapes = PolicyRollouts(RolloutData(environment=PromptsConfig(**fields), seq_tokens=4), GRPOConfig()).shapes(
        2, None
    )
    arrays = {"tokens": np.arange(3), "sampled": np.array([False, True, True]), "logprobs": np.zeros(3)}
    episode = Trajectory(
        group=0, task=0, **arrays, versions=np.zeros(3), rewards=np.zeros(3), facts={"right": 1.0, "brief": 0.25}
    )
    batch = batch_of([episode], shapes=shapes, version=0)
    assert batch["reward.right"].tolist() == [1.0, 0.0] and batch["reward.brief"].tolist() == [0.25, 0.0]
    assert batch["reward.neg"].tolist() == [0.0, 0.0] and batch["reward"].tolist() == [0.0, 0.0]
