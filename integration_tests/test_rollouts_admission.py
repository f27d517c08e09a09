"""More episodes than the engine `llm` has room for: all are played, as with a wide engine, and groups share prompts."""

import dataclasses
import queue

import numpy as np
import pytest

from stack_core.abi.errors import EngineBusy
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.contracts import Action, Environment, Observation, StepResult, Tasks
from stack_rl.episodes import Attempt, Player
from stack_rl.sampling import PolicySampling
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine

from .test_serving import CONFIG, model_of, opened

GROUPS, GROUP_SIZE, SEQ_TOKENS = 2, 3, 32
ATTEMPTS = [Attempt(group, group) for group in range(GROUPS) for _ in range(GROUP_SIZE)]
WIDE = EngineConfig(max_sequences=8, step_tokens=64, page_tokens=4)
# Two sequences run and two wait, of six; the pages of two are one and a half.
NARROW = EngineConfig(max_sequences=2, step_tokens=16, page_tokens=4, pages=12, max_tokens=SEQ_TOKENS, max_waiting=2)


class Repeating(Environment):
    """Two turns: a prompt of 17 tokens, and one token more."""

    def __init__(self, task: int) -> None:
        self._prompt = tuple(np.random.default_rng(task).integers(4, CONFIG.vocab_size, 17).tolist())
        self._turns = 0

    async def reset(self) -> Observation:
        return Observation(tokens=self._prompt, max_tokens=5)

    async def step(self, action: Action) -> StepResult:
        self._turns += 1
        return StepResult(reward=1.0, observation=Observation(tokens=(5,), max_tokens=4) if self._turns < 2 else None)

    async def close(self) -> None: ...


class RepeatingTasks(Tasks):
    """A task per group."""

    training, held_out = GROUPS, 0

    def episode(self, task: int, *, held_out: bool = False) -> Environment:
        return Repeating(task)

    def name(self, task: int, *, held_out: bool = False) -> str:
        return str(task)

    def text(self, tokens: tuple[int, ...]) -> str:
        return str(tokens)


@pytest.fixture(scope="module")
def checkpoint():
    return opened(model_of(dataclasses.replace(CONFIG, layers=1)))


def together(engine):
    return Player(RepeatingTasks(), engine, seq_tokens=SEQ_TOKENS, on_failure="stop").play(
        ATTEMPTS, seed=(0,), greedy=False
    )


def ahead(engine):
    found = queue.SimpleQueue()
    settings = {"seq_tokens": SEQ_TOKENS, "on_failure": "stop", "timeout_s": 60.0}
    player = ConcurrentPlayer(RepeatingTasks(), engine, seed=0, policy_sampling=PolicySampling(), **settings)
    for group in range(GROUPS):
        player.begin(ATTEMPTS[group * GROUP_SIZE :][:GROUP_SIZE], found.put, found.put)
    groups = [found.get(timeout=120) for _ in range(GROUPS)]
    player.close()
    assert all(isinstance(group, list) for group in groups), groups
    return [each for group in sorted(groups, key=lambda group: group[0].group) for each in group]


class Counted(LLMEngine):
    """An engine that counts how often its queue was full."""

    refused = 0

    def submit(self, request, receive=None):
        try:
            super().submit(request, receive)
        except EngineBusy:
            self.refused += 1
            raise


def test_more_episodes_than_fit_are_played_like_with_a_wide_engine_where_groups_share_prompts(checkpoint):
    with Counted(checkpoint, WIDE) as wide, Counted(checkpoint, NARROW) as narrow:
        for play in (together, ahead):
            expected, found = play(wide), play(narrow)
            if play is together:
                # The last token of a prompt is always computed, so 4 of its 5 pages are shared, 16 of 17 tokens; and
                # each second turn finds at least these.
                others = GROUPS * (GROUP_SIZE - 1)
                assert wide.stats().prefix_hits_tokens >= 16 * (others + len(ATTEMPTS))
            assert len(found) == len(ATTEMPTS)
            for one, other in zip(expected, found, strict=True):
                np.testing.assert_array_equal(one.tokens, other.tokens)
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert wide.refused == 0 < narrow.refused and narrow.stats().waiting == narrow.stats().running == 0
