"""Groups divided between processes, which are threads here, with a store in memory."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, TokenLogprob
from stack_core.runtime.processes import Processes
from stack_rl.contracts import Action, Observation, StepResult
from stack_rl.episodes import Player
from stack_rl.groups import Group, Ledger
from stack_rl.rollout_journal import RolloutJournal
from stack_rl.share import Share
from stack_rl.supply import Rounds, TogetherSupply, Weights

from .scripted import ScriptedEngine


class Store:
    """Keys and values as JAX's coordinator keeps them."""

    def __init__(self) -> None:
        self.values, self.changed = dict[str, Any](), threading.Condition()

    def key_value_set(self, key: str, value: Any) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> Any:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, 30):
                raise jax.errors.JaxRuntimeError(f"no {key}")
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        del self.values[key]

    key_value_set_bytes, blocking_key_value_get_bytes = key_value_set, blocking_key_value_get


class SeededEngine(ScriptedEngine):
    """Samples a token by the request's seed."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: ())
        self.submitted = 0

    def submit(self, request: GenerationRequest, receive: Any = None) -> None:
        super().submit(request)
        self.submitted += 1

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        (request,) = (each for each in self.requests if each.request_id == request_id)
        token = int(np.random.default_rng(request.sampling.seed).integers(10))
        logprobs = (TokenLogprob(token, -0.1 * token, 1),)
        versions = (self._version,)
        yield GenerationUpdate(
            request_id=request_id, tokens=(token,), logprobs=logprobs, weights_versions=versions, finish_reason="stop"
        )


class TwoTurns:
    """An episode of one or two turns; its reward is the parity of the last token."""

    def __init__(self, task: int, *, held_out: bool = False) -> None:
        self.left = 1 + task % 2

    async def reset(self) -> Observation:
        return Observation(tokens=(3, 4), max_tokens=1)

    async def step(self, action: Action) -> StepResult:
        self.left -= 1
        if self.left:
            return StepResult(observation=Observation(tokens=(5,), max_tokens=1))
        return StepResult(reward=float(action.tokens[-1] % 2))

    async def close(self) -> None: ...


TASKS: Any = SimpleNamespace(training=None, held_out=0, episode=TwoTurns, name=str, text=str)


def play(share: Share, journal: RolloutJournal | None = None, batches: int = 2) -> tuple[list[bytes], int]:
    """The serialized groups of some batches of three groups, and the number of requests of this process."""
    engine = SeededEngine()
    player = Player(TASKS, engine, seq_tokens=16, on_failure="stop")
    rounds = Rounds(TASKS, 3, 2, 7, Ledger(), journal, refill_rounds=2, share=share)
    supply, found = TogetherSupply(rounds, player), list[bytes]()
    for version in range(batches):
        groups = supply.take(Weights(version, np.array([version], np.uint32)))
        rounds.ledger.use([each.number for each in groups])
        found += [b"%d %s" % (each.number, each.to_bytes()) for each in groups]
    return found, engine.submitted


def in_both(function: Callable[[Share], Any]) -> list[Any]:
    store = Store()
    shares = [Share(Processes(place, 2, store)) for place in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, shares))


@pytest.mark.filterwarnings("ignore:Batch 0 has")
def test_processes_play_each_group_once_and_all_have_the_groups_of_a_single_one() -> None:
    alone, requests = play(Share())
    (first, first_requests), (second, second_requests) = in_both(play)
    assert first == second == alone and len(alone) > 6  # some flat groups were replaced
    assert first_requests + second_requests == requests and min(first_requests, second_requests) > 0


@pytest.mark.filterwarnings("ignore:Batch 0 has")
def test_a_process_takes_its_own_groups_from_its_journal_whatever_the_others_have(tmp_path: Path) -> None:
    def played(share: Share) -> tuple[list[bytes], int]:
        journal = RolloutJournal.open(tmp_path / f"{share.processes.id}.journal", new=False)
        journal.begin(Ledger(), 0)
        try:
            return play(share, journal, batches=1)
        finally:
            journal.close()

    (whole, _), _ = in_both(played)
    (tmp_path / "1.journal").unlink()
    (first, first_requests), (second, second_requests) = in_both(played)
    assert first == second == whole
    assert first_requests == 0 < second_requests


def test_processes_that_sample_ahead_have_equally_many_groups() -> None:
    share = Share(Processes(1, 2, Store()))
    assert (share.groups_ahead(6), share.rows(5)) == (3, 3)
    assert [each.number for each in share.select([Group(number, 0, "", []) for number in range(5)])] == [1, 3]
    with pytest.raises(ConfigError, match=r"data.groups is 5, which the 2 processes of the run do not divide"):
        share.groups_ahead(5)
