"""Episodes with a scripted engine: what trajectories hold, budgets, failures."""

import asyncio
import queue
import threading
import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, EngineBusy, EngineStopped, EnvironmentFailed, StackError
from stack_core.abi.generation import GenerationUpdate
from stack_rl import episodes
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.contracts import Action, EnvironmentKind, Observation, StepResult, Tasks
from stack_rl.environments.cell import CellConfig
from stack_rl.episodes import Attempt, Player
from stack_rl.groups import Group
from stack_rl.rewards.unchecked import Unchecked
from stack_rl.sampling import PolicySampling

from .scripted import Policy, ScriptedEngine


@dataclass
class Counting:
    """An environment that counts up from its task and goes on for some turns."""

    task: int
    turns: int
    max_tokens: int = 2
    fails: str = ""
    closed: list[int] = field(default_factory=list)

    async def reset(self) -> Observation:
        if self.fails == "reset":
            raise RuntimeError("no connection")
        return Observation(tokens=(self.task,), max_tokens=self.max_tokens)

    async def step(self, action: Action) -> StepResult:
        if self.fails == "nan":
            return StepResult(reward=float("nan"))
        self.turns -= 1
        more = Observation(tokens=(9, 9), max_tokens=self.max_tokens) if self.turns else None
        return StepResult(reward=0.5, observation=more, facts={"tokens": float(len(action.tokens))})

    async def close(self) -> None:
        self.closed.append(self.task)


class CountingTasks:
    training, held_out = None, 0

    def __init__(self, **fields):
        self._fields, self.closed = fields, []

    def episode(self, task, *, held_out=False):
        fields = {**self._fields, "fails": self._fields.get("fails", "") if task % 2 else ""}
        return Counting(task, closed=self.closed, **fields)

    def name(self, task, *, held_out=False):
        return f"task {task}"

    def text(self, tokens):
        return " ".join(map(str, tokens))


def play(tasks, tokens=(5, 6), count=2, seq_tokens=20, on_failure="stop", timeout_s=60.0, **options):
    engine = ScriptedEngine(lambda prompt: tokens)
    player = Player(tasks, engine, seq_tokens=seq_tokens, on_failure=on_failure, timeout_s=timeout_s)
    attempts = [Attempt(group, group) for group in range(count)]
    return engine, player.play(attempts, **{"seed": (0,), "greedy": False, **options})


def test_a_trajectory_holds_what_was_shown_and_what_was_drawn():
    tasks = CountingTasks(turns=2)
    engine, (first, second) = play(tasks)
    assert first is not None and second is not None
    assert first.tokens.tolist() == [0, 5, 6, 9, 9, 5, 6] and second.tokens[0] == 1
    assert first.sampled.tolist() == [False, True, True, False, False, True, True]
    assert first.logprobs.tolist() == [0, -1, -1, 0, 0, -1, -1]
    assert first.versions.tolist() == [-1, 0, 0, -1, -1, 0, 0]
    assert first.rewards.tolist() == [0, 0, 0.5, 0, 0, 0, 0.5]
    assert first.facts == {"tokens": 2.0} and not first.is_truncated
    assert [request.prompt for request in engine.requests[2:]] == [(0, 5, 6, 9, 9), (1, 5, 6, 9, 9)]
    assert tasks.closed == [0, 1]
    samplings = [request.sampling for request in engine.requests]
    assert len({each.seed for each in samplings}) == 4 and {each.temperature for each in samplings} == {1.0}
    assert {each.logprobs_of for each in samplings} == {"processed"}


def test_draws_are_a_function_of_the_seed():
    seeds = [
        [each.sampling.seed for each in play(CountingTasks(turns=1), seed=seed)[0].requests]
        for seed in ((3,), (3,), (4,))
    ]
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.parametrize(
    ("seq_tokens", "tokens"), [(4, [0, 5, 6]), (6, [0, 5, 6, 9, 9, 5]), (7, [0, 5, 6, 9, 9, 5, 6])]
)
def test_an_episode_keeps_to_its_budget(seq_tokens, tokens):
    _, (first, _) = play(CountingTasks(turns=2), seq_tokens=seq_tokens)
    assert first is not None and first.tokens.tolist() == tokens
    assert first.is_truncated == (seq_tokens < 7)


@pytest.mark.parametrize(
    ("fails", "message"), [("reset", "RuntimeError: no connection"), ("nan", "the reward is nan; it must be finite")]
)
def test_a_failure_stops_the_run_or_drops_the_episode_and_closes_all(fails, message):
    tasks = CountingTasks(turns=1, fails=fails)
    with pytest.raises(EnvironmentFailed, match=rf"(?s)episode at task 1 failed: .*{message}.*on_failure: drop"):
        play(tasks)
    assert tasks.closed == [0, 1]
    _, (first, second) = play(CountingTasks(turns=1, fails=fails), on_failure="drop")
    assert first is not None and first.rewards.sum() == 0.5 and second is None


@dataclass
class Hanging(Counting):
    """Its odd tasks never answer, or block the thread that all environments share."""

    blocks: bool = False

    async def step(self, action: Action) -> StepResult:
        if self.task % 2:
            await asyncio.sleep(0 if self.blocks else 60)
            time.sleep(1.0 if self.blocks else 0.0)
        return await super().step(action)


class HangingTasks(CountingTasks):
    def episode(self, task, *, held_out=False):
        return Hanging(task, closed=self.closed, **self._fields)


def test_an_environment_that_hangs_has_failed(monkeypatch):
    with pytest.raises(EnvironmentFailed, match=r"task 1 failed: .*no answer within data.step_timeout_s: 0.1"):
        play(HangingTasks(turns=1), timeout_s=0.1)
    _, (first, second) = play(HangingTasks(turns=1), timeout_s=0.1, on_failure="drop")
    assert first is not None and second is None
    monkeypatch.setattr(episodes, "_FAREWELL_S", 0.1)
    with pytest.raises(EnvironmentFailed, match=r"has blocked the event loop for more than 0.2 s"):
        play(HangingTasks(turns=1, blocks=True), timeout_s=0.1, on_failure="drop")
    time.sleep(1.2)  # until its thread goes on, and ends what is left


def test_what_could_not_be_checked_is_left_out_whatever_is_said_of_failures():
    class Checked(CountingTasks):
        def episode(self, task, *, held_out=False):
            episode = super().episode(task)
            if task == 1:
                episode.step = self._step
            return episode

        async def _step(self, action):
            raise Unchecked("timeout: of a library")

    _, (first, second) = play(Checked(turns=1))
    assert first is not None and second is None


def test_groups_are_played_beside_the_caller_and_tell_how_they_ended():
    engine, found = ScriptedEngine(lambda prompt: (5, 6)), queue.SimpleQueue()
    engine.submit = lambda request, receive: [
        ScriptedEngine.submit(engine, request),
        *map(receive, engine.stream(request.request_id)),
    ]
    for fails in ("", "reset"):
        tasks = CountingTasks(turns=2, fails=fails)
        player = ConcurrentPlayer(
            tasks, engine, seq_tokens=20, seed=0, on_failure="stop", timeout_s=5.0, policy_sampling=PolicySampling()
        )
        player.begin([Attempt(3, 1), Attempt(3, 0)], found.put, found.put)
        ended = found.get(timeout=5)
        player.close()
        if fails:
            assert isinstance(ended, EnvironmentFailed) and "task 1 failed" in str(ended)
        else:
            assert [each.tokens.tolist() for each in ended] == [[1, 5, 6, 9, 9, 5, 6], [0, 5, 6, 9, 9, 5, 6]]
            assert sorted(tasks.closed) == [0, 1]
    seeds = [each.sampling.seed for each in engine.requests[:4]]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("refuses", [True, False])
def test_an_engine_that_has_failed_stops_the_run_even_if_failed_episodes_are_dropped(refuses):
    engine, found = ScriptedEngine(lambda prompt: (5, 6)), queue.SimpleQueue()

    def stopped(*ignored):
        raise EngineStopped("the engine is gone")

    engine.stats = stopped
    engine.submit = lambda request, receive: (
        stopped()
        if refuses
        else receive(GenerationUpdate(request_id=request.request_id, finish_reason="error", error="cut off"))
    )
    player = ConcurrentPlayer(
        CountingTasks(turns=2),
        engine,
        seq_tokens=20,
        seed=0,
        on_failure="drop",
        timeout_s=5.0,
        policy_sampling=PolicySampling(),
    )
    player.begin([Attempt(3, 0), Attempt(3, 1)], found.put, found.put)
    assert isinstance(found.get(timeout=5), EngineStopped)
    engine.stats = lambda: None  # the engine itself goes on: the request alone has failed
    if not refuses:
        player.begin([Attempt(3, 0)], found.put, found.put)
        assert found.get(timeout=5) == [None]
    player.close()


def test_an_engine_may_answer_after_the_end_of_the_run():
    engine, submitted = ScriptedEngine(lambda prompt: (5, 6)), queue.SimpleQueue()
    engine.submit = lambda request, receive: submitted.put((request, receive))
    player = ConcurrentPlayer(
        CountingTasks(turns=1),
        engine,
        seq_tokens=20,
        seed=0,
        on_failure="stop",
        timeout_s=5.0,
        policy_sampling=PolicySampling(),
    )
    ended = queue.SimpleQueue()
    player.begin([Attempt(0, 0)], ended.put, ended.put)
    request, receive = submitted.get(timeout=5)
    player.close()
    receive(GenerationUpdate(request_id=request.request_id, finish_reason="abort"))
    assert ended.empty(), "a cancelled group has neither trajectories nor a failure"


def test_a_prompt_that_leaves_no_room_is_named():
    with pytest.raises(EnvironmentFailed, match=r"task 0 failed: .*no room for an action in data.seq_tokens: 1"):
        play(CountingTasks(turns=1), seq_tokens=1)


def test_an_engine_that_gives_up_is_no_reward():
    engine = ScriptedEngine(lambda prompt: (5,))
    aborted = lambda name: iter(
        [next(ScriptedEngine.stream(engine, name)).__class__(request_id=name, finish_reason="abort")]
    )
    engine.stream = aborted
    player = Player(CountingTasks(turns=1), engine, seq_tokens=9, on_failure="drop")
    with pytest.raises(StackError, match="ended a rollout with 'abort'"):
        player.play([Attempt(0, 0)], seed=(0,), greedy=True)


class TestCell:
    def tasks(self, **fields) -> Tasks:
        kind = CellConfig(**fields)
        assert isinstance(kind, EnvironmentKind)
        return kind.build(Policy(), seq_tokens=6, seed=0)

    def test_looking_at_the_asked_cell_and_naming_its_digit_earns_1(self):
        tasks = self.tasks(held_out=3)
        assert isinstance(tasks, Tasks)

        def answer(prompt):  # the cell that is asked for, then what was shown
            return (prompt[1],) if len(prompt) == 3 else (prompt[-1],)

        player = Player(tasks, ScriptedEngine(answer), seq_tokens=6, on_failure="stop")
        found = player.play([Attempt(task, task) for task in range(20)], seed=(0,), greedy=False)
        assert {float(each.rewards.sum()) for each in found if each} == {1.0}
        assert {each.verdict for each in found if each} == {"correct"}
        shown = [int(each.tokens[4]) for each in found if each]
        assert len(set(shown)) > 3 and tasks.text((10, 3, 10, 99)) == "| 3 | <99>"

    def test_looking_elsewhere_earns_no_more_than_a_guess(self):
        player = Player(self.tasks(), ScriptedEngine(lambda prompt: (11,)), seq_tokens=6, on_failure="stop")
        found = player.play([Attempt(task, task) for task in range(5)], seed=(0,), greedy=False)
        assert [int(each.tokens[4]) for each in found if each] == [11] * 5
        assert {each.verdict for each in found if each} == {"wrong"}

    def test_it_needs_its_tokens(self):
        with pytest.raises(ConfigError, match="vocab_size is 8, but the environment 'cell' has 12 tokens"):
            CellConfig().check(type("Model", (), {"vocab_size": 8}))
        with pytest.raises(ConfigError, match="seq_tokens is 5"):
            CellConfig().build(Policy(), seq_tokens=5, seed=0)


def test_training_and_held_out_tasks_are_others():
    tasks = CellConfig(cells=2).build(Policy(), seq_tokens=6, seed=0)
    firsts = []
    for held_out in (False, True):
        episodes = [tasks.episode(task, held_out=held_out) for task in range(30)]
        firsts.append([episode._digits for episode in episodes])
    assert not np.array_equal(*firsts)


class BusyEngine(ScriptedEngine):
    """An engine whose queue has room for three requests."""

    waiting = 0

    def submit(self, request, receive=None):
        if self.waiting == 3:
            raise EngineBusy("3 continuations wait already.", retry_after_s=0.0)
        self.waiting += 1
        super().submit(request, receive)

    def stream(self, request_id):
        self.waiting -= 1
        return super().stream(request_id)


def test_more_episodes_than_an_engine_queues_are_played():
    engines = ScriptedEngine(lambda prompt: (5, 0)), BusyEngine(lambda prompt: (5, 0))
    attempts = [Attempt(task, task) for task in range(20)]
    found = []
    for engine in engines:
        player = Player(CountingTasks(turns=2), engine, seq_tokens=16, on_failure="stop")
        found.append([each.tokens.tolist() for each in player.play(attempts, seed=(0,), greedy=False)])
    assert found[0] == found[1] and len(found[0]) == 20
    assert engines[0].requests == engines[1].requests  # in the same order


class NarrowEngine(ScriptedEngine):
    """An engine with room for one request, which it answers a little later; it asks others to retry in a minute."""

    is_busy = False

    def submit(self, request, receive=None):
        if self.is_busy:
            raise EngineBusy("1 continuation waits already.", retry_after_s=60.0)
        self.is_busy = True
        super().submit(request)

        def answer():
            self.is_busy = False
            for update in self.stream(request.request_id):
                receive(update)

        threading.Timer(0.01, answer).start()


def test_an_episode_that_finds_the_queue_full_acts_as_soon_as_another_has_acted():
    found = queue.SimpleQueue()
    player = ConcurrentPlayer(
        CountingTasks(turns=2),
        NarrowEngine(lambda prompt: (5, 6)),
        seq_tokens=20,
        seed=0,
        on_failure="stop",
        timeout_s=5.0,
        policy_sampling=PolicySampling(),
    )
    player.begin([Attempt(0, task) for task in range(6)], found.put, found.put)
    played = found.get(timeout=20)
    player.close()
    assert [each.tokens.tolist()[0] for each in played] == list(range(6))


class Half(Counting):
    """An environment whose numbers are NumPy's."""

    async def step(self, action):
        outcome = await super().step(action)
        return replace(outcome, reward=np.float16(60_000), facts={"turns": np.int64(self.turns)})


def test_rewards_of_an_environment_are_summed_in_double_precision_and_written_as_json():
    class HalfTasks(CountingTasks):
        def episode(self, task, *, held_out=False):
            return Half(task, closed=self.closed, turns=2, max_tokens=1)

    player = Player(HalfTasks(), ScriptedEngine(lambda prompt: (5,)), seq_tokens=16, on_failure="stop")
    (found,) = player.play([Attempt(0, 0)], seed=(0,), greedy=False)
    assert found.rewards.sum() == 120_000 and found.rewards.dtype == np.float32
    group = Group(0, 0, "", [found])
    assert Group.from_bytes(0, group.to_bytes()).trajectories[0].facts == {"turns": 0.0}
