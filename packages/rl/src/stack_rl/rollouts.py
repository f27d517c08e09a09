"""`data.name: rollouts`: batches of episodes that the policy itself generates in an environment."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import Selected, changed_fields, config, to_mapping
from stack_core.abi.data import Batch, Shapes
from stack_core.abi.digest import tree_digest
from stack_core.abi.engines import Engine, checked_engine
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.plugins import registries
from stack_core.abi.policy import PolicyBatches
from stack_core.abi.run_directory import RunDirectory
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.contracts import Tasks, Trajectory
from stack_rl.environments.records import files_digest
from stack_rl.episodes import STEP_TIMEOUT_S, Attempt, OnFailure, Player, SamplingFilter
from stack_rl.experience import REFERENCE_LOGPROBS, batch_of, batch_shapes, credited_by_values
from stack_rl.groups import Group, Ledger, trained_on
from stack_rl.pacing import Pacing
from stack_rl.placing import ShardedCheckpoint
from stack_rl.reference import Reference, ReferenceConfig
from stack_rl.rollout_journal import RolloutJournal
from stack_rl.supply import AheadSupply, Rounds, Supply, TogetherSupply, Weights

__all__ = ["RolloutBatches", "RolloutData", "RolloutIterator"]

SAMPLES_FILE, JOURNAL_FILE = "samples.jsonl", "rollouts.journal"
# Episodes per evaluation that are saved for the report.
_SHOWN = 16
_SCORED = ("tokens", "targets", "positions", "segment_ids")
_HELD_OUT = 1

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@config
class RolloutData:
    """Episodes of an environment, sampled from the current weights as groups of attempts at each task.

    A batch has one row per episode: the observed and sampled tokens, the log-probabilities at sampling time, and for
    each token the advantage and its weight in the loss. The policy samples at temperature 1 from the whole vocabulary,
    which is the distribution that the objective differentiates. With `top_p` or `top_k`, each token keeps the
    candidates it was sampled from, and the objective differentiates the distribution over these candidates.

    With `max_staleness: 0`, a batch is sampled on request from the weights that it will train, and is a function of the
    seed, the batch number and the weights. Otherwise groups are sampled while the policy trains, up to `max_staleness`
    steps before their use, and each token comes from the weights current at that moment. Every dispatched group is
    eventually used; a slow group is waited for once it is due.

    Groups stay in the run's `rollouts.journal` until a checkpoint includes the update trained on them. A resumed run
    reads them from there, samples unfinished groups again, and skips none.

    Evaluation plays every held-out task once with greedy decoding, and saves the first 16 episodes for the run's
    report.

    Attributes:
      environment: environment config, an entry of the registry `environments`.
      name: selects this data in the registry `data`.
      groups: number of tasks per batch.
      group_size: number of attempts at each task.
      seq_tokens: maximum number of tokens per episode, including prompts and observations.
      advantage: advantage estimator. "group": reward minus the group's mean, divided by the group's standard deviation;
        "centred": reward minus the group's mean; "leave_one_out": reward minus the mean of the group's other rewards;
        "whitened": "centred" divided by its standard deviation over the batch; "gae": generalized advantage estimation
        per token, which needs an objective with a critic, such as "ppo".
      discount: gamma of "gae".
      decay: lambda of "gae".
      whiten: whether "gae" whitens advantages over the sampled tokens of the batch.
      critic_warmup_steps: for "gae": number of initial steps with advantages of 0, which train the critic but not yet
        the policy on rewards. A new critic predicts 0, so if rewards are far from 0, it would credit tokens by their
        distance from the end of the answer.
      weights: weight of each token in the loss. "sequence": equal weight per episode; "token": equal weight per token;
        "constant": 1 / (rows * seq_tokens); "prompt": equal weight per task, and per token within a task; "sum": 1.
      engine: name of the generation engine, an entry of the registry `engines`.
      engine_mesh: mesh, over the machine's last devices, for the policy weights that generate. With None, the engine
        "static" uses the trainer's mesh, `mesh`, which has all devices.
      reference: reference model on a separate mesh that scores every batch, for an objective with `reference: data`.
        None: the data has no reference.
      on_failure: handling of an episode whose environment or reward fails: "stop" ends the run, "drop" leaves the
        episode out and counts it.
      step_timeout_s: time limit of one environment step in seconds; a longer step is a failure.
      top_p: nucleus sampling threshold, as in `SamplingParams`; 1 samples from all tokens.
      top_k: number of most likely tokens to sample from, as in `SamplingParams`; 0 samples from all tokens.
      most_candidates: maximum number of candidates per token; every batch reserves this many entries per token. A token
        with more candidates raises a DataError.
      refill_rounds: replace groups whose rewards are all equal by newly sampled groups (DAPO's dynamic sampling), at
        most `refill_rounds * groups` per batch. If that is not enough, groups with equal rewards fill the batch and a
        warning reports the rewards found. 0 replaces none.
      max_staleness: maximum number of steps between the dispatch of a group and its use: 0 is synchronous, 1 is one
        step off-policy.
      stale_keys: handling of the KV cache when the engine receives new weights: "keep" its entries, or "recompute" them
        with the new weights.
    """

    environment: Annotated[Any, Selected(registries.environments)]
    name: Literal["rollouts"] = "rollouts"
    groups: PositiveInt = 16
    group_size: Annotated[int, Field(ge=2)] = 8
    seq_tokens: PositiveInt = 256
    advantage: Literal["group", "centred", "leave_one_out", "whitened", "gae"] = "group"
    discount: Fraction = 1.0
    decay: Fraction = 0.95
    whiten: bool = True
    critic_warmup_steps: NonNegativeInt = 0
    weights: Literal["sequence", "token", "constant", "prompt", "sum"] = "sequence"
    engine: str = "static"
    engine_mesh: MeshConfig | None = None
    reference: ReferenceConfig | None = None
    on_failure: OnFailure = "stop"
    step_timeout_s: PositiveFloat = STEP_TIMEOUT_S
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegativeInt = 0
    most_candidates: PositiveInt = 64
    refill_rounds: NonNegativeInt = 0
    max_staleness: NonNegativeInt = 0
    stale_keys: Literal["keep", "recompute"] = "keep"

    @property
    def batch_size(self) -> int:
        """Number of rows per batch."""
        return self.groups * self.group_size

    @property
    def draw_digest(self) -> str:
        """Digest of everything that sampled groups depend on except the weights: settings and task files."""
        names = ("environment", "groups", "group_size", "seq_tokens", "top_p", "top_k")
        settings = {name: to_mapping(getattr(self, name)) for name in names}
        source = getattr(self.environment, "source", None)
        written = json.dumps([settings, files_digest(source) if isinstance(source, str) else None], sort_keys=True)
        # A prefix of the digests in the journal; the colon separates it from the digest of the weights.
        return hashlib.sha256(written.encode()).hexdigest()[:16] + ":"

    @property
    def sampling_filter(self) -> SamplingFilter:
        """Sampling restrictions of the policy."""
        return SamplingFilter(self.top_p, self.top_k)

    def spec(self, model: Any) -> Shapes:
        candidates = self.most_candidates if self.sampling_filter.is_narrowed else 0
        more = {"values": self.advantage == "gae", "reference": self.reference is not None}
        return batch_shapes(self.batch_size, self.seq_tokens, candidates=candidates, **more)

    def work(self) -> tuple[str, int]:
        return "episodes", self.batch_size

    def check(self, model: Any) -> None:
        if self.seq_tokens > model.max_positions:
            raise ConfigError(
                f"data.seq_tokens is {self.seq_tokens}, but model.max_positions is {model.max_positions}. Lower the "
                "first or raise the second."
            )
        of_critic = ("discount", "decay", "whiten", "critic_warmup_steps")
        if self.advantage != "gae" and (unread := changed_fields(self, of_critic)):
            raise ConfigError(
                f"data.advantage is {self.advantage!r}, so data.{' and data.'.join(unread)} would have no "
                "effect. Set data.advantage: gae, for an objective with a critic such as ppo, or leave that out."
            )
        if not self.sampling_filter.is_narrowed and changed_fields(self, ("most_candidates",)):
            raise ConfigError(
                "data.most_candidates would have no effect, because every token is a candidate. Set data.top_k or "
                "data.top_p, or leave it out."
            )
        if self.reference is not None:
            self.reference.check()
        self.environment.check(model)

    def build(self, *, seed: int, model: Any) -> "RolloutBatches":
        return RolloutBatches(self, model, seed=seed)


class RolloutBatches(PolicyBatches):
    """Batches of episodes played by the policy; see `PolicyBatches`."""

    def __init__(self, config: RolloutData, model: Any, *, seed: int) -> None:
        self._config, self._seed, self._settings = config, seed, config.draw_digest
        self._shapes = config.spec(model)
        self._tasks: Tasks | None = None
        self._engine: Engine | None = None
        self._reference: Reference | None = None
        self._player: Player | None = None
        self._supply: Supply | None = None
        self._journal: RolloutJournal | None = None
        self._ledger = Ledger()
        self._weights: Weights | None = None
        self._scores: Callable[[Batch], Mapping[str, Any]] | None = None
        self._directory: Path | None = None

    def take_policy(self, open_policy: Callable[[], GenerativeCheckpoint]) -> None:
        """Creates the tasks and the engine that plays them.

        Raises:
          StackError: the tasks or the engine cannot be created.
        """
        settings, policy = self._config, open_policy()
        self._tasks = settings.environment.build(policy, seq_tokens=settings.seq_tokens, seed=self._seed)
        if self._tasks.training == 0:
            raise DataError(f"The environment {settings.environment.name!r} has no task to train on.")
        if settings.reference is not None:
            self._reference = Reference(settings.reference, policy)
        placed: Any = policy if settings.engine_mesh is None else ShardedCheckpoint(policy, settings.engine_mesh)
        self._engine = checked_engine(settings.engine, registries.engines[settings.engine](placed))
        self._engine.expect(settings.batch_size)
        self._engine.start()
        playing = {
            "seq_tokens": settings.seq_tokens,
            "on_failure": settings.on_failure,
            "timeout_s": settings.step_timeout_s,
            "sampling_filter": settings.sampling_filter,
        }
        self._player = Player(self._tasks, self._engine, **playing)
        sizes = settings.groups, settings.group_size
        kept = {"journal": self._journal, "refill_rounds": settings.refill_rounds}
        rounds = Rounds(self._tasks, *sizes, self._seed, self._ledger, **kept)
        if settings.max_staleness:
            beside = ConcurrentPlayer(self._tasks, self._engine, seed=self._seed, **playing)
            self._supply = AheadSupply(rounds, beside, Pacing(settings.groups, settings.max_staleness))
        else:
            self._supply = TogetherSupply(rounds, self._player)

    @property
    def takes_trained(self) -> bool:
        """Whether the engine accepts only the trained parameters, such as an adapter, and keeps its base."""
        return self._engine is not None and self._engine.keeps_missing

    def update_weights(self, params: Any, version: int, score: Callable[[Any, Batch], Mapping[str, Any]]) -> None:
        """Sends the weights to the engine, for the next batch or, with `max_staleness`, for requests in flight."""
        if self._engine is None or self._supply is None:
            raise DataError("No policy was given yet to draw from: call take_policy first.")
        self._weights = Weights(version, tree_digest(params), self._settings)
        self._scores = partial(score, params)
        # Before `advance`, which may dispatch groups that count as sampled with these weights.
        self._engine.update_weights(params, version=version, kv=self._config.stale_keys)
        self._supply.advance(self._weights)

    def train_iterator(self) -> "RolloutIterator":
        settings = self._config
        fingerprint = {
            "seed": self._seed,
            "data.groups": settings.groups,
            "data.group_size": settings.group_size,
        }
        return RolloutIterator(self._next_batch, self._state, self._restore, fingerprint)

    def checkpoint_saved(self, step: int, steps: Sequence[int]) -> None:
        """Acknowledges the groups that the saved checkpoint was trained on."""
        if self._journal is not None:
            self._journal.saved(step, steps)

    def close(self) -> None:
        """Stops all running episodes. Sampled groups stay in the journal."""
        if self._supply is not None:
            self._supply.close()
        if self._engine is not None:
            self._engine.close()
        if self._journal is not None:
            self._journal.close()

    def validation_batches(self) -> Iterator[Batch]:
        """Yields batches of all held-out tasks, played greedily with the current weights."""
        tasks, player = self._playing()
        rows, shown = self._config.batch_size, _SHOWN
        for first in range(0, tasks.held_out, rows):
            numbers = range(first, min(first + rows, tasks.held_out))
            attempts = [Attempt(task, task, held_out=True) for task in numbers]
            found = player.play(attempts, seed=(self._seed, _HELD_OUT, first), greedy=True)
            self._write_samples(tasks, found[:shown])
            shown = max(shown - len(found), 0)
            # Evaluation reports rewards; no advantage may enter its loss, also not one from a critic.
            batch = self._batch(found, training=False)
            yield {**batch, "advantages": np.zeros_like(batch["advantages"])}

    def write(self, directory: Path) -> None:
        """Opens the journal in the run's directory, and stores the directory for evaluation samples."""
        self._directory = directory
        if self._journal is None:
            is_new = not RunDirectory(directory).config.exists()  # the config is written last, so no run started here
            self._journal = RolloutJournal.open(directory / JOURNAL_FILE, new=is_new)
            if is_new:  # a run that failed to start may have left samples
                (directory / SAMPLES_FILE).unlink(missing_ok=True)

    def _next_batch(self) -> Batch:
        """Returns the next batch, from the journal if it was recorded for the same weights, else newly sampled."""
        weights, supply, journal, number = self._weights, self._supply, self._journal, self._ledger.batches
        if weights is None or supply is None:
            raise DataError("No policy was given yet to play with: call take_policy and update_weights first.")
        if journal is not None and not journal.is_begun:
            if weights.version:  # a checkpoint was resumed without its position in the data
                journal.restart()
            else:
                journal.begin(self._ledger, 0, self._settings)
        groups = None if journal is None else journal.replayed(number, weights.digest)
        if groups is None:
            groups = supply.take(weights)
            if journal is not None:
                journal.note(number, [each.number for each in groups], weights.digest)
        self._ledger.use([each.number for each in groups])
        return self._batch_of(groups)

    def _batch_of(self, groups: Sequence[Group]) -> Batch:
        chosen = trained_on(groups, self._config.groups)
        found = [each for group in chosen for each in group.trajectories]
        if all(each is None for each in found):
            raise DataError("Every episode of a batch failed and was dropped; set data.on_failure: stop to see why.")
        batch = self._batch(found, training=True)
        batch["drawn_groups"][:] = len(groups) / self._config.groups
        return batch

    def _state(self) -> dict[str, Any]:
        """Returns the position in the data, for a checkpoint that is being saved."""
        if self._journal is not None:
            self._journal.position(self._version, self._ledger.batches)
        return {"step": self._version, **self._ledger.state()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._ledger.restore(state)
        if self._journal is not None:
            self._journal.begin(self._ledger, state["step"], self._settings)

    def _batch(self, found: Sequence[Trajectory | None], *, training: bool) -> dict[str, np.ndarray]:
        settings, by_values = self._config, self._config.advantage == "gae"
        advantage = settings.advantage if training and not by_values else None
        options = {"shapes": self._shapes, "weights": settings.weights, "version": self._version}
        batch = batch_of(found, advantage=advantage, **options)
        if self._reference is not None:
            batch[REFERENCE_LOGPROBS] = self._reference.logprobs(batch)
        if not by_values:
            return batch
        how = {"discount": settings.discount, "decay": settings.decay, "whiten": settings.whiten}
        credited = credited_by_values(batch, found, self._values(batch), **how)
        # During the warm-up, `returns` train the critic, and advantages of 0 keep rewards from the policy.
        if self._version >= settings.critic_warmup_steps:
            return credited
        return {**credited, "advantages": np.zeros_like(credited["advantages"])}

    def _values(self, batch: Batch) -> np.ndarray:
        """Computes the critic's values before each target of a batch.

        Raises:
          DataError: the objective has no critic.
        """
        assert self._scores is not None, "update_weights has not been called"
        scores = self._scores({name: batch[name] for name in _SCORED})
        if "values" not in scores:
            raise DataError(
                "data.advantage is 'gae', which needs a critic's values, but the objective has no critic. Choose "
                "objective.name: ppo, or another data.advantage."
            )
        return np.asarray(scores["values"])

    @property
    def _version(self) -> int:
        return 0 if self._weights is None else self._weights.version

    def _playing(self) -> tuple[Tasks, Player]:
        if self._tasks is None or self._player is None:
            raise DataError("No policy was given yet to play with: call take_policy first.")
        return self._tasks, self._player

    def _write_samples(self, tasks: Tasks, found: Sequence[Trajectory | None]) -> None:
        if self._directory is None:
            return
        with (self._directory / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            for each in found:
                if each is not None:
                    file.write(json.dumps(self._sample(tasks, each)) + "\n")

    def _sample(self, tasks: Tasks, each: Trajectory) -> dict[str, Any]:
        """Converts an episode to a record for the report, with observations and actions as alternating turns."""
        # A turn ends where the next token has another source, the environment or the policy.
        turns = np.flatnonzero(np.diff(each.sampled)) + 1
        pieces = [tuple(map(int, piece)) for piece in np.split(each.tokens, turns)]
        return {
            "step": self._version,
            "task": tasks.name(each.task, held_out=True),
            "turns": [tasks.text(piece) for piece in pieces],
            "reward": float(each.rewards.sum()),
            "verdict": each.verdict,
            **({"facts": dict(each.facts)} if each.facts else {}),
        }


class RolloutIterator:
    """Iterator over batches of rollouts. Its state holds the used groups and the step of the weights."""

    def __init__(
        self,
        take: Callable[[], Batch],
        state: Callable[[], dict[str, Any]],
        restore: Callable[[Mapping[str, Any]], None],
        fingerprint: Mapping[str, Any],
    ) -> None:
        self._take, self._state, self._restore, self._fingerprint = take, state, restore, dict(fingerprint)

    def __iter__(self) -> "RolloutIterator":
        return self

    def __next__(self) -> Batch:
        return self._take()

    def get_state(self) -> dict[str, Any]:
        return {**self._state(), **self._fingerprint}

    def set_state(self, state: Any) -> None:
        """Restores the position at which `state` was taken.

        Raises:
          DataError: the state belongs to different rollouts.
        """
        places = ("step", *Ledger().state())
        is_state = isinstance(state, Mapping) and all(name in state for name in places)
        if not is_state or any(state.get(name) != value for name, value in self._fingerprint.items()):
            raise DataError(f"The saved position {state!r} is not one of these rollouts: {self._fingerprint}.")
        self._restore(state)
