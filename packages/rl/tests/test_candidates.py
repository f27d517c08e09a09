"""Candidates in trajectories, in their bytes and in batches."""

from dataclasses import replace

import numpy as np
import pytest

from stack_core.abi.errors import DataError
from stack_core.abi.generation import GenerationUpdate, SamplingParams, TokenLogprob
from stack_rl.environments.cell import CellConfig
from stack_rl.episodes import Attempt, Player
from stack_rl.experience import batch_of, batch_shapes
from stack_rl.groups import Group
from stack_rl.objectives.presets import DrGRPOConfig
from stack_rl.rollouts import RolloutData
from stack_rl.sampling import PolicySampling

from .scripted import Policy, ScriptedEngine


class Narrow(ScriptedEngine):
    """Draws token 3 from the candidates 3 and 5, then 4 from 4 alone."""

    def stream(self, request_id):
        (request,) = (each for each in self.requests if each.request_id == request_id)
        assert request.sampling.top_p == 0.9 and request.sampling.candidates
        token, candidates = (3, (3, 5)) if len(request.prompt) == 3 else (4, (4,))
        yield GenerationUpdate(
            request_id=request_id,
            tokens=(token,),
            logprobs=(TokenLogprob(token, -0.5, 1),),
            weights_versions=(0,),
            candidates=(candidates,),
            finish_reason="length",
        )


def played():
    tasks = CellConfig().build(Policy(), seq_tokens=6, seed=0)
    player = Player(
        tasks, Narrow(lambda prompt: ()), seq_tokens=6, on_failure="stop", policy_sampling=PolicySampling(top_p=0.9)
    )
    return player.play([Attempt(0, 0), Attempt(0, 0)], seed=(0,), greedy=False)


def test_trajectories_keep_what_each_token_was_drawn_from():
    first, _ = played()
    counts, tokens = first.candidates
    assert counts.tolist() == [0, 0, 0, 2, 0, 1] and tokens.tolist() == [3, 5, 4]
    read = Group.from_bytes(0, Group(0, 0, "", [first, None, first]).to_bytes())
    assert read.trajectories[1] is None
    for each in (read.trajectories[0], read.trajectories[2]):
        assert [part.tolist() for part in each.candidates] == [[0, 0, 0, 2, 0, 1], [3, 5, 4]]
        assert each.rewards.tolist() == first.rewards.tolist()


def test_batches_have_a_row_of_candidates_for_each_target():
    batch = batch_of(played(), shapes=batch_shapes(3, 6, DrGRPOConfig(), candidates=2), version=0)
    assert batch["targets"][0].tolist() == [-100, -100, 3, -100, 4, -100]
    nothing = [-1, -1]
    assert batch["candidates"][0].tolist() == [nothing, nothing, [3, 5], nothing, [4, -1], nothing]
    assert (batch["candidates"][2] == -1).all()
    with pytest.raises(DataError, match=r"drawn from 2 candidates, but data.max_candidates is 1"):
        batch_of(played(), shapes=batch_shapes(2, 6, DrGRPOConfig(), candidates=1), version=0)
    assert "candidates" not in batch_of(played(), shapes=batch_shapes(2, 6, DrGRPOConfig()), version=0)
    assert np.asarray(batch["candidates"]).dtype == np.int32


def test_the_settings_of_the_data_reach_the_engine_and_greedy_decoding_ignores_them():
    settings = {"temperature": 0.7, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    data = RolloutData(environment=CellConfig(), repetition_penalty=1.2, top_k=3, **settings)
    assert data.draw_digest != RolloutData(environment=CellConfig()).draw_digest
    engine = ScriptedEngine(lambda prompt: (3,))
    tasks = CellConfig().build(Policy(), seq_tokens=6, seed=0)
    player = Player(tasks, engine, seq_tokens=6, on_failure="stop", policy_sampling=data.policy_sampling)
    for greedy in (False, True):
        player.play([Attempt(0, 0)], seed=(0,), greedy=greedy)
    sampled, greedy = engine.requests[0].sampling, engine.requests[-1].sampling
    for name, value in {**settings, "repetition_penalty": 1.2, "top_k": 3, "candidates": True}.items():
        assert getattr(sampled, name) == value, name
        assert getattr(greedy, name) == (0.0 if name == "temperature" else getattr(SamplingParams(), name)), name


def test_batches_have_the_settings_and_the_place_of_each_target_in_its_action():
    sampling = PolicySampling(temperature=0.7, presence_penalty=0.5)
    shapes = batch_shapes(3, 6, DrGRPOConfig(), sampling=sampling)
    (one, _) = played()
    one = replace(one, sampled=np.asarray([False, False, False, True, True, True]), action_starts=(3, 4))
    batch = batch_of([one], shapes=shapes, version=0, sampling=sampling)
    assert batch["generated_tokens"][0].tolist() == [0, 0, 0, 0, 1, 0]
    assert (batch["temperature"] == np.float32(0.7)).all() and (batch["penalties"] == np.float32([1, 0, 0.5])).all()
    # Greedy episodes of an evaluation have the model's log-probabilities.
    greedy = batch_of([one], shapes=shapes, version=0)
    assert (greedy["temperature"] == 1).all() and (greedy["penalties"] == np.float32([1, 0, 0])).all()
    plain = batch_shapes(3, 6, DrGRPOConfig())
    assert not {"temperature", "penalties", "generated_tokens"} & set(plain)
    (read,) = Group.from_bytes(0, Group(0, 0, "", [one]).to_bytes()).trajectories
    assert list(read.action_starts) == [3, 4]
