"""Experts of the sampler in trajectories, in their bytes and in batches."""

import json
import queue
from dataclasses import replace

import numpy as np

from stack_core.abi.generation import GenerationUpdate, TokenLogprob
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.environments.cell import CellConfig
from stack_rl.episodes import Attempt, Player
from stack_rl.experience import batch_of, batch_shapes
from stack_rl.groups import Group
from stack_rl.objectives.presets import DrGRPOConfig
from stack_rl.packing import PackedRows
from stack_rl.sampling import AS_MODEL

from .scripted import Policy, ScriptedEngine
from .test_episodes import CountingTasks


def experts_of(request, places):
    """The experts of two mixtures, which differ by place, mixture and request."""
    return np.asarray([[[place, 50], [60, len(request.prompt)]] for place in places], np.int16)


class Routed(ScriptedEngine):
    """Reports experts with every update: the prompt's with the first, and those of each token before the next."""

    reports_experts = True

    def stream(self, request_id):
        (request,) = (each for each in self.requests if each.request_id == request_id)
        assert request.sampling.experts
        prompt = len(request.prompt)
        inputs = iter([range(prompt), [prompt]])
        for count, token in enumerate((5, 6), 1):
            yield GenerationUpdate(
                request_id=request_id,
                tokens=(token,),
                logprobs=(TokenLogprob(token, -0.5, 1),),
                weights_versions=(0,),
                experts=experts_of(request, next(inputs)),
                finish_reason="length" if count == 2 else None,
            )

    def submit(self, request, receive=None):
        super().submit(request)
        for update in self.stream(request.request_id) if receive else ():
            receive(update)


def played():
    """Two actions of two tokens after observations of one and two tokens: 0, 5, 6, 9, 9, 5, 6."""
    player = Player(CountingTasks(turns=2), Routed(None), seq_tokens=20, on_failure="stop", experts=True)
    return player.play([Attempt(0, 0)], seed=(0,), greedy=False)[0]


def test_a_token_keeps_the_experts_of_the_first_action_that_reports_them():
    found = played()
    assert found.tokens.tolist() == [0, 5, 6, 9, 9, 5, 6] and found.experts.dtype == np.int16
    assert found.experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, -1]
    # The length of the prompt: the first action's is 1, and the second one's is 5.
    assert found.experts[:, 1, 1].tolist() == [1, 1, 5, 5, 5, 5, -1]
    (read,) = Group.from_bytes(0, Group(0, 0, "", [found]).to_bytes()).trajectories
    np.testing.assert_array_equal(read.experts, found.experts)
    assert read.rewards.tolist() == found.rewards.tolist()


def test_episodes_that_run_concurrently_have_the_same_experts():
    settings = {"seq_tokens": 20, "seed": 0, "on_failure": "stop", "timeout_s": 60.0}
    player = ConcurrentPlayer(CountingTasks(turns=2), Routed(None), **settings, policy_sampling=AS_MODEL, experts=True)
    found = queue.SimpleQueue()
    player.begin([Attempt(0, 0)], found.put, found.put)
    (concurrent,) = found.get(timeout=20)
    player.close()
    np.testing.assert_array_equal(concurrent.experts, played().experts)


def test_a_journal_of_an_earlier_version_has_no_experts():
    written = Group(0, 0, "", [replace(played(), experts=None)]).to_bytes()
    line, _, rest = written.partition(b"\n")
    head = json.loads(line)
    assert head["trajectories"][0].pop("experts") is None
    (read,) = Group.from_bytes(0, json.dumps(head).encode() + b"\n" + rest).trajectories
    assert read.experts is None and read.tokens.tolist() == [0, 5, 6, 9, 9, 5, 6]


def test_batches_have_the_experts_of_each_input_packed_or_not():
    found = played()
    shapes = batch_shapes(3, 8, DrGRPOConfig(), experts=(2, 2))
    batch = batch_of([found, replace(found, experts=None), found], shapes=shapes, version=0)
    assert batch["experts"].dtype == np.int16
    np.testing.assert_array_equal(batch["experts"][0, :6], found.experts[:-1])
    assert (batch["experts"][0, 6:] == -1).all() and (batch["experts"][1] == -1).all()
    short = {name: array[[0, 2]] for name, array in batch.items()}
    wide = {name: np.pad(x, [(0, 0), (0, 4), *[(0, 0)] * (x.ndim - 2)]) for name, x in short.items() if x.ndim > 1}
    packed = PackedRows.plan(wide["segment_ids"], (1,)).pack(wide)
    np.testing.assert_array_equal(packed["experts"][0], [*found.experts[:-1], *found.experts[:-1]])
    assert "experts" not in batch_shapes(3, 8, DrGRPOConfig())


def test_without_replay_no_experts_are_requested():
    engine = ScriptedEngine(lambda prompt: (3,))
    tasks = CellConfig().build(Policy(), seq_tokens=6, seed=0)
    found = Player(tasks, engine, seq_tokens=6, on_failure="stop").play([Attempt(0, 0)], seed=(0,), greedy=False)
    assert found[0].experts is None and not any(each.sampling.experts for each in engine.requests)
