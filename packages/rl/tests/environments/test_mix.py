"""Mixes of environments: exact shares, an order without state, and weights that follow the measured difficulty."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import ConfigError, StackError
from stack_rl.choosing import ChoosesTasks, choose_task
from stack_rl.contracts import EnvironmentKind, Tasks, Trajectory
from stack_rl.environments.mix import CurriculumConfig, CurriculumTasks, MixConfig, MixedTasks
from stack_rl.rollouts import RolloutData

from .playing import play_episode, policy


@dataclass
class Episode:
    """An episode that is never played."""

    label: str
    task: int
    held_out: bool

    async def reset(self): ...

    async def step(self, action): ...

    async def close(self): ...


class Numbers:
    """Tasks that are only numbers."""

    def __init__(self, training=None, held_out=0, label=""):
        self.training, self.held_out, self.label = training, held_out, label

    def episode(self, task, *, held_out=False):
        return Episode(self.label, task, held_out)

    def name(self, task, *, held_out=False):
        return f"{self.label}{task}"

    def text(self, tokens):
        return ""


def mixed(weights, *, seed=0, parts=None) -> MixedTasks:
    return MixedTasks(
        parts or [Numbers(label=chr(97 + each)) for each in range(len(weights))], [*map(float, weights)], seed=seed
    )


def chosen(tasks, groups, memory=None, seed=0) -> list[tuple[int, int]]:
    numbers = [choose_task(each, tasks, memory or {}, seed=seed) for each in groups]
    return [(number % len(tasks.parts), number // len(tasks.parts)) for number in numbers]


@pytest.mark.parametrize("weights", [(1, 2, 5), (0.1, 0.7, 0.2), (3, 1), (1, 1, 1), (0.3, 0.3, 0.01, 7)])
def test_shares_are_exact_after_every_block(weights):
    shares = [Fraction(each) / sum(map(Fraction, weights)) for each in weights]
    size = math.ceil(1 / min(shares))
    counts, found = Counter(), chosen(mixed(weights), range(size * 12))
    for block in range(12):
        counts.update(part for part, _ in found[block * size : (block + 1) * size])
        groups = (block + 1) * size
        assert sum(counts.values()) == groups
        assert all(abs(counts[part] - share * groups) < 1 for part, share in enumerate(shares))


def test_each_environment_visits_its_tasks_as_if_it_were_the_only_one():
    finite = Numbers(training=5)
    found = chosen(mixed((2, 1), parts=[Numbers(), finite], seed=3), range(60), seed=3)
    assert [place for part, place in found if part == 0] == list(range(40))
    places = [place for part, place in found if part == 1]
    assert places == [choose_task(each, finite, {}, seed=3) for each in range(20)] and set(places[:5]) == set(range(5))


def test_the_order_is_a_function_of_seed_and_number():
    groups = range(40)
    forward = chosen(mixed((1, 2, 1)), groups)
    assert chosen(mixed((1, 2, 1)), reversed(groups)) == forward[::-1]
    assert chosen(mixed((1, 2, 1), seed=1), groups) != forward
    parts = [part for part, _ in forward]
    assert any(parts[4 * each : 4 * each + 4] != parts[:4] for each in range(10)), "blocks have different orders"


def test_held_out_tasks_are_those_of_all_environments():
    tasks = mixed((1, 1, 1), parts=[Numbers(held_out=2, label="a"), Numbers(label="b"), Numbers(held_out=3, label="c")])
    assert isinstance(tasks, Tasks) and isinstance(tasks, ChoosesTasks) and tasks.held_out == 5
    assert [tasks.name(each, held_out=True) for each in range(5)] == ["a0", "a1", "c0", "c1", "c2"]
    assert tasks.episode(4, held_out=True) == Episode("c", 2, True)
    assert tasks.episode(7) == Episode("b", 2, False)


def attempt(group, task, *, reward=0.0, verdict=None) -> Trajectory:
    none = np.zeros(1, np.float32)
    arrays = {"tokens": none, "sampled": none, "logprobs": none, "versions": none}
    return Trajectory(group=group, task=task, rewards=np.float32([reward]), verdict=verdict, **arrays)


def curriculum(**settings) -> CurriculumTasks:
    parts = [Numbers(), Numbers(), Numbers()]
    return CurriculumTasks(parts, (1.0, 1.0, 2.0), seed=0, curriculum=CurriculumConfig(**settings))


def test_weights_follow_the_running_success():
    tasks = curriculum(rate=0.5, floor=0.1)
    assert tasks.shares({}) == [0.25, 0.25, 0.5]
    batch = [
        *[attempt(4, 0, verdict="correct") for _ in range(2)],
        *[attempt(5, 1, reward=1.0), attempt(5, 1, reward=0.5)],
        *[attempt(7, 3, reward=2.0, verdict="wrong"), attempt(7, 3, verdict="correct")],
    ]
    memory = tasks.learn(batch, {})
    assert tasks.successes(memory) == [0.625, 0.5, 0.5]  # 0.5 -> 0.75 -> 0.625, in the order of the groups
    memory = json.loads(json.dumps(memory))
    assert tasks.learn(batch[:2], memory) == {"success": {"0": 0.8125, "1": 0.5, "2": 0.5}}
    easy = {"success": {"0": 1.0, "1": 0.5, "2": 0.0}}
    np.testing.assert_allclose(tasks.shares(easy), np.array([0.1, 1.0, 0.2]) / 1.3)
    counts = Counter(part for part, _ in chosen(tasks, range(1300), easy))
    assert [counts[part] for part in range(3)] == pytest.approx([100, 1000, 200], abs=3)


def test_a_success_without_a_verdict_is_a_reward():
    tasks = curriculum(rate=1.0, success_reward=0.25)
    assert tasks.successes(tasks.learn([attempt(0, 0, reward=0.25), attempt(0, 0, reward=0.2)], {}))[0] == 0.5
    assert tasks.successes(tasks.learn([attempt(0, 0, reward=1.0), attempt(0, 0, reward=0.25)], {}))[0] == 1.0


def sums(tmp_path, name, *prompts):
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": each, "answer": each.upper()}) + "\n" for each in prompts))
    return {"name": "prompts", "source": str(path), "rewards": ["exact"], "max_tokens": 20}


def test_a_mix_is_written_as_names_and_mappings_and_plays_each_environment(tmp_path):
    mapping = {"environments": [sums(tmp_path, "a", "a"), {"environment": sums(tmp_path, "b", "b", "c"), "weight": 3}]}
    config = parse(MixConfig, mapping)
    assert isinstance(config, EnvironmentKind) and parse(MixConfig, to_mapping(config)) == config
    assert [each.weight for each in config.environments] == [1.0, 3.0]
    tasks, found = play_episode(config, ["A"], task=0)
    assert found.rewards.sum() == 1.0 and tasks.text(tuple(found.tokens.tolist())) == "aA"
    (second, _) = play_episode(config, ["B"], task=1)
    assert second.name(1).endswith("b.jsonl:1") and second.name(3).endswith("b.jsonl:2")


def test_another_file_of_tasks_is_another_source(tmp_path):
    environments = [sums(tmp_path, "a", "a"), {"name": "mix", "environments": [sums(tmp_path, "b", "b"), "cell"]}]
    data = parse(RolloutData, {"environment": {"name": "mix", "environments": environments}})
    before = data.draw_digest
    assert data.draw_digest == before
    sums(tmp_path, "b", "c")
    assert data.draw_digest != before


def test_a_mix_within_a_mix_keeps_its_own_shares_and_tasks(tmp_path):
    inner = [{"environment": sums(tmp_path, "b", "b", "c"), "weight": 3}, sums(tmp_path, "d", "d")]
    outer = parse(MixConfig, {"environments": [sums(tmp_path, "a", "a"), {"name": "mix", "environments": inner}]})
    tasks = outer.build(policy(), seq_tokens=100, seed=0)
    names = Counter(tasks.name(choose_task(group, tasks, {}, seed=0)).rpartition("/")[2] for group in range(16))
    assert names == {"a.jsonl:1": 8, "b.jsonl:1": 3, "b.jsonl:2": 3, "d.jsonl:1": 2}
    inner = {"name": "mix", "environments": inner, "curriculum": {}}
    outer = parse(MixConfig, {"environments": [sums(tmp_path, "a", "a"), inner]})
    with pytest.raises(ConfigError, match=r"environments\[1\] is a mix with a curriculum, which only the outer mix"):
        outer.check(None)


def test_a_mix_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="environments"):
        parse(MixConfig, {"environments": ["cell"]})
    small = parse(MixConfig, {"environments": ["cell", {"environment": "cell", "weight": 1e-6}]})
    with pytest.raises(ConfigError, match=r"share of 1e-06; at least 0\.0001"):
        small.check(None)
    empty = parse(MixConfig, {"environments": [sums(tmp_path, "a", "a"), sums(tmp_path, "none")]})
    with pytest.raises(StackError, match=r"environments\[1\], 'prompts', has no task to train on"):
        play_episode(empty, [""])
