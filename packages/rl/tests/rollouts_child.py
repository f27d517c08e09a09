"""A process of a run on rollouts without a model, which is killed at a named moment.

Its "weights" are two numbers that each batch changes, bit for bit by what the batch holds; a scripted engine draws by
them. It goes on from its newest checkpoint, and writes what each step used to `steps.json`.
"""

import asyncio
import hashlib
import importlib
import json
import os
import signal
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.config import config
from stack_core.abi.generation import GenerationUpdate, TokenLogprob
from stack_core.runtime.processes import join
from stack_rl import rollout_batches, rollouts
from stack_rl.contracts import Observation, StepResult
from stack_rl.objectives.presets import DrGRPOConfig

from .scripted import Policy, ScriptedEngine

STEPS, EVERY, KEPT = 8, 3, 2


class Engine(ScriptedEngine):
    """Draws by the weights and the seed, now or for a receiver."""

    def __init__(self, policy):
        super().__init__(lambda prompt: ())
        self._weights = np.zeros(2)

    def update_weights(self, params, *, version=None, kv="keep", donate=False):
        self._version, self._weights = version, np.asarray(params["w"])

    def submit(self, request, receive=None):
        super().submit(request)
        if receive is not None:
            for update in self.stream(request.request_id):
                receive(update)

    def stream(self, request_id):
        (request,) = (each for each in self.requests if each.request_id == request_id)
        self.requests.remove(request)
        seed = [request.sampling.seed, int(self._weights[0]), int(self._weights[1])]
        token = int(np.random.default_rng(seed).integers(10))
        logprob = TokenLogprob(token, float(-token) - 0.1, 1)
        yield GenerationUpdate(
            request_id=request_id,
            tokens=(token,),
            logprobs=(logprob,),
            weights_versions=(self._version,),
            finish_reason="stop",
        )


class Sleepy:
    """An episode of two turns; its second takes a time of its own."""

    def __init__(self, task):
        self._task, self._turns = task, 0

    async def reset(self):
        return Observation(tokens=(self._task % 100,), max_tokens=1)

    async def step(self, action):
        self._turns += 1
        if self._turns == 1:
            await asyncio.sleep(0.001 * (self._task * 7919 % 13))
            return StepResult(observation=Observation(tokens=(9,), max_tokens=1))
        return StepResult(reward=float(action.tokens[0] % 2))

    async def close(self): ...


class Tasks:
    training, held_out = None, 0

    def __init__(self, first_token):
        self._first_token = first_token

    def episode(self, task, *, held_out=False):
        return Sleepy(task + self._first_token)

    def name(self, task, *, held_out=False):
        return str(task)

    def text(self, tokens):
        return str(tokens)


@config
class SleepyConfig:
    name: str = "sleepy"
    first_token: int = 0

    def check(self, model): ...

    def build(self, policy, *, seq_tokens, seed):
        return Tasks(self.first_token)


def die_at(moment):
    where, when, count = moment.rsplit(":", 2)
    module, path = where.split(":")
    owner, name = path.split(".")
    owner = getattr(importlib.import_module(module), owner)
    method, calls = getattr(owner, name), [0]

    def dying(*args, **options):
        calls[0] += 1
        if calls[0] == int(count) and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = method(*args, **options)
        if calls[0] == int(count) and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, dying)


def score(params, batch):
    """Log-probabilities that depend on the weights, so that a score by other weights is noticed."""
    moved = np.float32(np.asarray(params["w"]).sum() / 2**18)
    return {"policy_logprobs": np.where(batch["targets"] != -100, batch["behaviour_logprobs"] - moved, 0)}


class Training:
    """The loop: weights, checkpoints, and what each step used."""

    def learn(self, weights, batch):
        text = b"".join(batch[name].tobytes() for name in sorted(batch) if name != "staleness")
        digest = hashlib.sha256(weights.tobytes() + text).digest()
        return np.frombuffer(digest[:4], np.uint16).astype(np.float32)

    def save(self, directory, step, weights, state, steps):
        unfinished = directory / "checkpoints" / "unfinished"
        unfinished.write_text(json.dumps({"step": step, "weights": weights.tolist(), "state": state, "steps": steps}))
        unfinished.rename(directory / "checkpoints" / f"{step:08d}.json")


def run(directory, staleness, moment, refill_rounds, replay_groups, minibatches, formation):
    """Runs to the end, or until it dies.

    Args:
      directory: directory of the run.
      staleness: maximum staleness.
      moment: moment to die at, as "module:Class.method:before|after:nth call", or "never".
      refill_rounds: maximum number of rounds of groups that replace flat ones.
      replay_groups: maximum number of stored groups that replace flat ones.
      minibatches: number of minibatches of a batch, which is used twice if there are several.
      formation: config of this process among several.
    """
    processes = join(formation)
    if moment != "never":
        die_at(moment if moment.startswith("stack_") else f"{__name__}:{moment}")
    rollout_batches.registries = SimpleNamespace(engines={"static": Engine})
    # With replay, the first checkpoint has stored groups, and the steps after it need them.
    seed = 1 if replay_groups else 0
    sizes = {"groups": 2, "group_size": 3 if replay_groups else 2, "seq_tokens": 8}
    several = {"epochs": 2, "minibatches": minibatches, "target_kl": 5.0} if minibatches > 1 else {}
    objective = DrGRPOConfig(refill_rounds=refill_rounds, **several)
    settings = rollouts.RolloutData(
        environment=SleepyConfig(), **sizes, max_staleness=staleness, replay_groups=replay_groups
    )
    data = settings.for_objective(objective).build(seed=seed, model=None)
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    processes.in_turn("files", lambda: [data.write(directory), (directory / "config.yaml").touch()])
    iterator = data.train_iterator()
    found = sorted((directory / "checkpoints").glob("*.json"))
    step, weights, steps = 0, np.asarray([1, 2], np.float32), []
    if found:
        saved = json.loads(found[-1].read_text())
        step, steps, weights = saved["step"], saved["steps"], np.asarray(saved["weights"], np.float32)
        iterator.set_state(saved["state"])
    data.take_policy(Policy)
    training = Training()
    data.update_weights({"w": jnp.asarray(weights)}, step, score)
    while step < STEPS:
        before = data._ledger.state()
        batch = next(iterator)
        weights = training.learn(weights, batch)
        step += 1
        used = [n for n in range(200) if data._ledger.is_used(n)]
        used = [n for n in used if not (n < before["frontier"] or n in before["beyond"])]
        stale, replayed = float(batch["staleness"].max()), float(batch["replayed_groups"].max())
        found = {"weights": weights.tolist(), "reward": batch["reward"].tolist(), "stale": stale, "replayed": replayed}
        steps.append({"groups": used, **found})
        data.update_weights({"w": jnp.asarray(weights)}, step, score)
        if step % EVERY == 0 or step == STEPS:
            state = iterator.get_state()
            # The others, too, have a checkpoint only once it is complete.
            save = partial(training.save, directory, step, weights, state, steps)
            processes.on_first("save", save)
            paths = sorted((directory / "checkpoints").glob("*.json"))
            for old in paths[:-KEPT]:
                old.unlink(missing_ok=True)
            data.checkpoint_saved(step, [int(each.stem) for each in paths[-KEPT:]])
    data.close()
    if processes.first:
        (directory / "steps.json").write_text(json.dumps(steps))
    if processes.count > 1:
        # Waits for the others, since the first hosts the coordinator. Children of `multiprocessing` run no handlers of
        # `atexit`, such as JAX's.
        jax.distributed.shutdown()
