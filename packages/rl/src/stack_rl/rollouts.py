"""`data.name: rollouts`: batches of episodes that the policy itself generates in an environment."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import Selected, changed_fields, config, to_mapping
from stack_core.abi.data import Batch, Shapes
from stack_core.abi.engines import Engine, checked_engine
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.plugins import registries
from stack_core.abi.policy import PolicyBatches
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.config import EngineProcessConfig
from stack_core.runtime.digest import tree_digest
from stack_core.runtime.gathering import gathered
from stack_core.runtime.processes import joined
from stack_rl.choosing import ChoosesTasks
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.contracts import Tasks, Trajectory
from stack_rl.engine_process import open_in_process
from stack_rl.environments.records import files_digest
from stack_rl.episode_images import IMAGE_COUNTS, IMAGE_INPUTS, check_image_data, image_shapes, images_per_row
from stack_rl.episodes import STEP_TIMEOUT_S, Attempt, OnFailure, Player
from stack_rl.experience import REFERENCE_LOGPROBS, batch_of, batch_shapes, credited, update_batch
from stack_rl.groups import Group, Ledger, trained_on
from stack_rl.objectives.policy import OF_DATA, PolicyConfig
from stack_rl.objectives.ppo import PPOConfig
from stack_rl.objectives.sampled import SAMPLING_INPUTS
from stack_rl.pacing import Pacing
from stack_rl.packing import PackedRows, row_counts
from stack_rl.placing import ShardedCheckpoint
from stack_rl.progress import RewardMonitor
from stack_rl.reference import Reference, ReferenceConfig
from stack_rl.replay import ReplayBuffer, ReplayFiles
from stack_rl.reward_parts import part_shapes
from stack_rl.rollout_journal import RecordedBatch, RolloutJournal
from stack_rl.routing import check_routing_replay, mixture_sizes
from stack_rl.samples import MOST_SAMPLES, SAMPLES_FILE, write_samples
from stack_rl.sampling import AS_MODEL, PolicySampling
from stack_rl.share import Share
from stack_rl.supply import AheadSupply, Rounds, Supply, TogetherSupply, Weights
from stack_rl.updates import CurrentBatch, check_minibatches, mean_kl

__all__ = ["PolicyRollouts", "RolloutBatches", "RolloutData", "RolloutIterator"]

_SCORED = (
    "tokens",
    "targets",
    "positions",
    "segment_ids",
    "behaviour_logprobs",
    "experts",
    *SAMPLING_INPUTS,
    *IMAGE_INPUTS,
    IMAGE_COUNTS,
)
_HELD_OUT = 1


@config
class RolloutData:
    """Episodes of an environment, sampled from the current weights as groups of attempts at each task.

    The algorithm, `objective`, computes the advantages of the episodes and uses each batch for one or more updates. A
    batch has one row per episode, or several episodes per row (`packed`): the observed and sampled tokens, the
    log-probabilities at sampling time, and for each token the advantage and its weight in the loss. The objective
    differentiates the sampling distribution, after penalties and temperature. With `top_p`, `top_k` or `min_p`, each
    token keeps its candidates, and the distribution is normalized over them. Greedy evaluation ignores these settings.

    With `max_staleness: 0`, a batch is sampled on request from the weights that it will train, and is a function of the
    seed, the batch number and the weights. Otherwise groups are sampled while the policy trains, up to `max_staleness`
    batches before their use, and each token comes from the weights current at that moment. Every dispatched group is
    eventually used; a slow group is waited for once it is due.

    With several processes, each plays its share of the groups with its own engine, see `Share`.

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
      engine: name of the generation engine, an entry of the registry `engines`.
      engine_mesh: mesh, over the machine's last devices, for the policy weights that generate. With None, the engine
        "static" uses the trainer's mesh, `mesh`, which has all devices. With `engine_process`, the mesh is over the
        last devices of that process, and None is its first device.
      engine_process: a process of its own for the engine, with its own devices, to which the weights are transferred.
        None runs the engine in the trainer's process, and is required if the run has several processes.
      reference: reference model on a separate mesh that scores every batch, for an objective with `reference: data`.
        None disables it.
      on_failure: handling of an episode whose environment or reward fails: "stop" ends the run, "drop" leaves the
        episode out and counts it.
      step_timeout_s: time limit of one environment step in seconds; a longer step is a failure.
      temperature: divisor of the logits, as in `SamplingParams`.
      top_p: nucleus sampling threshold, as in `SamplingParams`; 1 samples from all tokens.
      top_k: number of most likely tokens to sample from, as in `SamplingParams`; 0 samples from all tokens.
      min_p: minimum probability relative to the most likely token, as in `SamplingParams`; 0 samples from all tokens.
      repetition_penalty: penalty of tokens of the episode so far, as in `SamplingParams`; 1 has no effect.
      frequency_penalty: penalty of tokens of the action so far, for each occurrence, as in `SamplingParams`.
      presence_penalty: penalty of tokens of the action so far, as in `SamplingParams`.
      max_candidates: maximum number of candidates per token; every batch reserves this many entries per token. A token
        with more candidates raises a DataError.
      max_staleness: maximum number of batches between the dispatch of a group and its use: 0 is synchronous, 1 is one
        batch off-policy.
      stale_keys: handling of the KV cache when the engine receives new weights: "keep" its entries, or "recompute" them
        with the new weights.
      replay_groups: maximum number of groups with unequal rewards that are stored after their use. Each of them may
        replace a later group with equal rewards, newest first and at most once; 0 disables the replay.
      routing_replay: for mixtures of experts, replays the experts that the engine chose for each token in the policy's
        forward passes, instead of the choice of its own routers, which may differ by rounding or newer weights. The
        weights of the experts are the policy's. Prompts are replayed, too. Reference models choose for themselves.
      packed: True packs several episodes into a row for training and scoring, as segments that do not attend to each
        other. Batches then have fewer rows, and each new number of rows compiles another program, at most two per
        halving of the rows. Evaluation and `reference` are not packed.
      row_images: maximum number of images per row of a batch, at least the images of an episode, for environments with
        images. None is for text.
    """

    environment: Annotated[Any, Selected(registries.environments)]
    name: Literal["rollouts"] = "rollouts"
    groups: PositiveInt = 16
    group_size: Annotated[int, Field(ge=2)] = 8
    seq_tokens: PositiveInt = 256
    engine: str = "static"
    engine_mesh: MeshConfig | None = None
    engine_process: EngineProcessConfig | None = None
    reference: ReferenceConfig | None = None
    on_failure: OnFailure = "stop"
    step_timeout_s: PositiveFloat = STEP_TIMEOUT_S
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegativeInt = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: PositiveFloat = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    max_candidates: PositiveInt = 64
    max_staleness: NonNegativeInt = 0
    stale_keys: Literal["keep", "recompute"] = "keep"
    replay_groups: NonNegativeInt = 0
    routing_replay: bool = False
    packed: bool = False
    row_images: PositiveInt | None = None

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "advantage": "objective.advantage",
            "weights": "objective.loss_aggregation",
            "discount": "objective.gae_gamma",
            "decay": "objective.gae_lambda",
            "whiten": "objective.whiten_advantages",
            "critic_warmup_steps": "objective.critic_warmup_steps",
            "refill_rounds": "objective.refill_rounds",
            "most_candidates": "data.max_candidates",
        }
    )

    @property
    def batch_size(self) -> int:
        """Number of episodes per batch."""
        return self.groups * self.group_size

    @property
    def draw_digest(self) -> str:
        """Digest of everything that sampled groups depend on except the weights: settings and task files."""
        names = ["environment", "groups", "group_size", "seq_tokens", *vars(self.policy_sampling)]
        names += ["routing_replay"] if self.routing_replay else []  # digests of runs without it stay the same
        settings = {name: to_mapping(getattr(self, name)) for name in names}
        source = getattr(self.environment, "source", None)
        # An environment of several others has several sources.
        sources = getattr(self.environment, "sources", None)
        files: Any = files_digest(source) if isinstance(source, str) else sources and [*map(files_digest, sources)]
        written = json.dumps([settings, files], sort_keys=True)
        # A prefix of the digests in the journal; the colon separates it from the digest of the weights.
        return hashlib.sha256(written.encode()).hexdigest()[:16] + ":"

    @property
    def policy_sampling(self) -> PolicySampling:
        """Sampling settings of the policy."""
        return PolicySampling(**{each.name: getattr(self, each.name) for each in fields(PolicySampling)})

    def for_objective(self, objective: Any) -> "PolicyRollouts":
        """Returns the config of batches for an algorithm.

        Raises:
          ConfigError: the objective is no policy gradient, or the data and the algorithm do not fit together.
        """
        if not isinstance(objective, PolicyConfig):
            raise ConfigError(
                f"objective.name is {getattr(objective, 'name', objective)!r}, which cannot learn from rollouts. "
                "Choose a policy gradient, such as grpo (`stack rl list`), or another data.name."
            )
        check_minibatches(self.batch_size, objective)
        if self.reference is not None and not (objective.kl and objective.reference == OF_DATA):
            raise ConfigError(
                f"The data has a reference (data.reference), which the objective does not use: objective.kl is "
                f"{objective.kl}, and objective.reference is {objective.reference!r}. Set objective.kl and "
                "objective.reference: data, or leave data.reference out."
            )
        return PolicyRollouts(self, objective)


@dataclass(frozen=True)
class PolicyRollouts:
    """A `DataConfig`: rollouts that an algorithm learns from.

    Attributes:
      data: the episodes to play.
      algorithm: the algorithm.
    """

    data: RolloutData
    algorithm: PolicyConfig

    @property
    def name(self) -> str:
        return self.data.name

    def spec(self, model: Any) -> Shapes:
        experts = mixture_sizes(model) if self.data.routing_replay else None
        return self.shapes(self.data.batch_size // self.algorithm.minibatches, model, experts)

    def shapes(self, rows: int, model: Any, experts: tuple[int, int] | None = None) -> Shapes:
        """Returns the shapes of a batch.

        Args:
          rows: number of rows.
          model: config of the policy.
          experts: the `mixture_sizes` if experts are replayed.
        """
        data = self.data
        candidates = data.max_candidates if data.policy_sampling.is_narrowed else 0
        more = {
            "candidates": candidates,
            "temperatures": _plays_itself(data.environment),
            "reference": data.reference is not None,
            "experts": experts,
        }
        shapes = batch_shapes(rows, data.seq_tokens, self.algorithm, sampling=data.policy_sampling, **more)
        images = image_shapes(model, rows, data.seq_tokens, data.row_images)
        return {**shapes, **part_shapes(data.environment, rows), **images}

    def work(self) -> tuple[str, int]:
        return "episodes", self.data.batch_size // self.algorithm.minibatches

    def check(self, model: Any) -> None:
        data = self.data
        if data.seq_tokens > model.max_positions:
            raise ConfigError(
                f"data.seq_tokens is {data.seq_tokens}, but model.max_positions is {model.max_positions}. Lower the "
                "first or raise the second."
            )
        if not data.policy_sampling.is_narrowed and changed_fields(data, ("max_candidates",)):
            raise ConfigError(
                "data.max_candidates would have no effect, because every token is a candidate. Set data.top_k, "
                "data.top_p or data.min_p, or leave it out."
            )
        if data.packed or _plays_itself(data.environment):
            _check_positions(model, data)
        if data.engine not in registries.engines:
            raise registries.engines.unknown(data.engine)
        if data.routing_replay:
            check_routing_replay(model, data)
        check_image_data(model, data)
        if data.reference is not None:
            data.reference.check()
        data.environment.check(model)

    def build(self, *, seed: int, model: Any) -> "RolloutBatches":
        experts = mixture_sizes(model) if self.data.routing_replay else None
        return RolloutBatches(self, seed=seed, shapes=self.shapes(self.data.batch_size, model, experts))


def _plays_itself(environment: Any) -> bool:
    """Returns whether episodes may have several branches, and actions their own temperatures."""
    return getattr(environment, "plays_itself", False)


def _check_positions(model: Any, data: RolloutData) -> None:
    """Raises a ConfigError if the scaling of positions depends on the longest sequence of a row."""
    seq_tokens = data.seq_tokens
    scaling = getattr(model, "rope_scaling", None)
    kind = getattr(scaling, "rope_type", None)
    unscaled = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
    if kind in unscaled and seq_tokens > (limit := getattr(scaling, unscaled[kind])):
        reason, remedy = "data.packed is true", "data.packed: false, or "
        if not data.packed:
            reason, remedy = f"Episodes of {data.environment.name!r} may have several conversations", ""
        raise ConfigError(
            f"{reason}, but model.rope_scaling is {kind!r}, which depends on the longest sequence of a row: beyond "
            f"{limit} tokens, sequences of a row would change each other's positions, and data.seq_tokens is "
            f"{seq_tokens}. Set {remedy}data.seq_tokens to at most {limit}."
        )


@dataclass(frozen=True)
class _Play:
    """Environment, engine and players of a run.

    Attributes:
      tasks: tasks of the environment.
      engine: engine that generates actions.
      player: player of whole batches.
      supply: source of the groups of each batch.
      reference: reference model on a separate mesh; None if the data has none.
      monitor: warns if the rewards contain nothing to learn.
    """

    tasks: Tasks
    engine: Engine
    player: Player
    supply: Supply
    reference: Reference | None
    monitor: RewardMonitor


@dataclass(frozen=True)
class _Policy:
    """The current weights, and the function `score(batch)` that scores a batch with them."""

    weights: Weights
    score: Callable[[Batch], Mapping[str, Any]]


class RolloutBatches(PolicyBatches):
    """Batches of episodes played by the policy; see `PolicyBatches`."""

    def __init__(self, config: PolicyRollouts, *, seed: int, shapes: Shapes) -> None:
        self._config, self._data, self._algorithm = config, config.data, config.algorithm
        self._seed, self._share, self._shapes = seed, Share(joined()), shapes
        # Groups of another number of processes are divided in another way.
        count = self._share.processes.count
        self._settings = config.data.draw_digest if count == 1 else f"{count}-{config.data.draw_digest}"
        self._ledger = Ledger()
        self._play: _Play | None = None
        self._policy: _Policy | None = None
        self._current: CurrentBatch | None = None
        self._resumed_updates = 0
        self._journal: RolloutJournal | None = None
        self._directory: Path | None = None
        self._replay = ReplayBuffer(config.data.replay_groups)
        self._replay_files: ReplayFiles | None = None
        self._row_counts: tuple[int, ...] = ()

    def split_rows(self, parts: int) -> Sequence[int]:
        """Returns the numbers of rows of packed batches; () if batches are not packed."""
        if self._data.packed:
            self._row_counts = row_counts(self._data.batch_size // self._algorithm.minibatches, parts)
        return self._row_counts

    def take_policy(self, open_policy: Callable[[], GenerativeCheckpoint]) -> None:
        """Creates the tasks and the engine that plays them.

        Raises:
          StackError: the tasks or the engine cannot be created.
        """
        settings, policy, count = self._data, open_policy(), self._share.processes.count
        if settings.engine_process is not None and count > 1:
            raise ConfigError(
                f"data.engine_process is set, but the run has {count} processes, each of which generates with an "
                "engine of its own. Leave it out, or start one process."
            )
        tasks = settings.environment.build(policy, seq_tokens=settings.seq_tokens, seed=self._seed)
        if tasks.training == 0:
            raise DataError(f"The environment {settings.environment.name!r} has no task to train on.")
        reference = None if settings.reference is None else Reference(settings.reference, policy)
        if settings.engine_process is None:
            placed: Any = policy if settings.engine_mesh is None else ShardedCheckpoint(policy, settings.engine_mesh)
            engine = checked_engine(settings.engine, registries.engines[settings.engine](placed))
        else:
            engine = open_in_process(settings.engine, policy, settings.engine_process, mesh=settings.engine_mesh)
        engine.expect(self._share.rows(settings.groups) * settings.group_size)
        engine.start()
        playing = {
            "seq_tokens": settings.seq_tokens,
            "on_failure": settings.on_failure,
            "timeout_s": settings.step_timeout_s,
            "policy_sampling": settings.policy_sampling,
            "experts": settings.routing_replay,
        }
        player = Player(tasks, engine, **playing)
        sizes = settings.groups, settings.group_size
        stored = {
            "journal": self._journal,
            "refill_rounds": self._algorithm.refill_rounds,
            "share": self._share,
        }
        rounds = Rounds(tasks, *sizes, self._seed, self._ledger, **stored)
        supply: Supply = TogetherSupply(rounds, player)
        if settings.max_staleness:
            in_background = ConcurrentPlayer(tasks, engine, seed=self._seed, **playing)
            own_groups = self._share.groups_ahead(settings.groups)
            supply = AheadSupply(rounds, in_background, Pacing(own_groups, settings.max_staleness))
        self._play = _Play(tasks, engine, player, supply, reference, RewardMonitor(tasks, self._algorithm))

    @property
    def takes_trained(self) -> bool:
        """Whether the engine accepts only the trained parameters, such as an adapter, and keeps its base."""
        return self._play is not None and self._play.engine.keeps_missing

    def update_weights(self, params: Any, version: int, score: Callable[[Any, Batch], Mapping[str, Any]]) -> None:
        """Sends the weights to the engine, for the next batch or, with `max_staleness`, for requests in flight.

        With several processes, each gathers the weights for its own engine.
        """
        play, whole = self._playing(), gathered(params)
        weights = Weights(version, tree_digest(whole), self._settings)
        self._policy = _Policy(weights, partial(score, params))
        # Before `advance`, which may dispatch groups that count as sampled with these weights.
        play.engine.update_weights(whole, version=version, kv=self._data.stale_keys)
        play.supply.advance(weights)

    def train_iterator(self) -> "RolloutIterator":
        settings = self._data
        fingerprint = {
            "seed": self._seed,
            "data.groups": settings.groups,
            "data.group_size": settings.group_size,
        }
        return RolloutIterator(self._next_update, self._state, self._restore, fingerprint)

    def checkpoint_saved(self, step: int, steps: Sequence[int]) -> None:
        """Acknowledges the groups that the saved checkpoint was trained on."""
        if self._journal is not None:
            self._journal.saved(step, steps)
        if self._replay_files is not None:
            self._replay_files.keep(step, steps)

    def close(self) -> None:
        """Stops all running episodes. Sampled groups stay in the journal."""
        if self._play is not None:
            self._play.supply.close()
            self._play.engine.close()
        if self._journal is not None:
            self._journal.close()

    def validation_batches(self) -> Iterator[Batch]:
        """Yields batches of all held-out tasks, played greedily with the current weights."""
        play, rows, shown = self._playing(), self._data.batch_size, MOST_SAMPLES
        for first in range(0, play.tasks.held_out, rows):
            found = self._play_evaluation(play, range(first, min(first + rows, play.tasks.held_out)))
            if self._share.processes.first:
                write_samples(self._directory, play.tasks, found[:shown], self._version)
            shown = max(shown - len(found), 0)
            # Evaluation reports rewards; no advantage may enter its loss, also not one from a critic.
            whole = self._laid_out(found, self._version, AS_MODEL)
            whole = credited(whole, found, self._algorithm, self._score(whole))
            whole["advantages"] = np.zeros_like(whole["advantages"])
            for part in np.split(np.arange(rows), self._algorithm.minibatches):
                if whole["real"][part].any() or whole["dropped"][part].any():
                    yield update_batch(whole, part, found, self._algorithm)

    def _play_evaluation(self, play: _Play, tasks: range) -> list[Trajectory | None]:
        """Plays a batch of held-out tasks greedily; each process plays its share."""
        own = [task for task in tasks if self._share.plays(task)]
        attempts = [Attempt(task, task, held_out=True) for task in own]
        seed = self._seed, _HELD_OUT, tasks.start
        places = [task - tasks.start for task in own]
        found = play.player.play(attempts, seed=seed, greedy=True, places=places)
        groups = [Group(task, self._version, "", [each]) for task, each in zip(own, found, strict=True)]
        return [each for group in self._share.gather(groups) for each in group.trajectories]

    def write(self, directory: Path) -> None:
        """Opens the process's journal in the run's directory, and stores the directory for evaluation samples."""
        self._directory = directory
        if self._journal is None:
            is_new = not RunDirectory(directory).config.exists()  # the config is written last, so no run started here
            if is_new:  # a run that failed to start may have left samples, and journals of other processes
                for left in [directory / SAMPLES_FILE, *directory.glob("rollouts-*.journal*")]:
                    left.unlink(missing_ok=True)
            place = self._share.processes.id
            self._replay_files = ReplayFiles(directory, place)
            if is_new:
                self._replay_files.clear()
            name = f"rollouts-{place}.journal" if place else "rollouts.journal"
            self._journal = RolloutJournal.open(directory / name, new=is_new)

    def _next_update(self) -> Batch:
        """Returns the batch of the next update, from new episodes if no update of the current ones remains."""
        current, skipped = self._current, 0
        if current is not None and current.remaining and self._exceeds_target_kl(current):
            skipped = current.remaining
            current.next_update = self._algorithm.updates
        if current is None or not current.remaining:
            current = self._current = self._new_batch()
            if "skipped_updates" in current.arrays:
                current.arrays["skipped_updates"][:] = skipped
        update = current.take()
        return self._plan(update).pack(update) if self._data.packed else update

    def _exceeds_target_kl(self, current: CurrentBatch) -> bool:
        """Compares the policy's divergence, on the rows of the next update, with `objective.target_kl`."""
        limit = self._algorithm.target_kl
        if limit is None:
            return False
        assert current.policy_logprobs is not None, "scored for target_kl"
        rows = current.rows()
        batch = {name: array[rows] for name, array in current.arrays.items()}
        logprobs = np.asarray(self._scored(batch)["policy_logprobs"])
        return mean_kl(batch, logprobs, current.policy_logprobs[rows]) > limit

    def _new_batch(self) -> CurrentBatch:
        """Returns the next batch, from the journal if it was recorded for the same weights, else newly sampled."""
        play, policy, journal = self._playing(), self._policy, self._journal
        if policy is None:
            raise DataError("No policy was given yet to play with: call take_policy and update_weights first.")
        weights, number, before = policy.weights, self._ledger.batches, self._ledger.state()
        next_update, self._resumed_updates = self._resumed_updates, 0
        recorded = None if journal is None else self._recorded(journal, weights, is_begun=next_update > 0)
        if next_update and recorded is None:
            warnings.warn(
                f"The run stopped after update {next_update} of {self._algorithm.updates} of batch {number}, which the "
                "journal does not have any more. A new batch is sampled.",
                stacklevel=4,
            )
            next_update = 0
        groups = play.supply.take(weights) if recorded is None else self._share.gather(recorded.groups)
        version = weights.version if recorded is None else recorded.version
        chosen, replay_before = trained_on(groups, self._data.groups), self._replay
        if self._replay.size:
            chosen, self._replay = self._replay.replace_flat(chosen)
        found = [each for group in chosen for each in group.trajectories]
        if all(each is None for each in found):
            raise DataError("Every episode of a batch failed and was dropped; set data.on_failure: stop to see why.")
        if self._share.processes.first:
            play.monitor.check(found)
        whole = self._laid_out(found, version, self._data.policy_sampling)
        whole["drawn_groups"][:] = len(groups) / self._data.groups
        drawn = {each.number for each in groups}
        whole["replayed_groups"][:] = np.mean([each.number not in drawn for each in chosen])
        scores = self._score(whole) if recorded is None else recorded.scores
        if journal is not None and recorded is None:
            own = [each.number for each in self._share.select(groups)]
            journal.note(number, own, weights.digest, weights.version, scores)
        self._ledger.use([each.number for each in groups])
        if isinstance(play.tasks, ChoosesTasks):
            learned = [each for group in groups for each in group.trajectories if each is not None]
            self._ledger.memory = play.tasks.learn(learned, self._ledger.memory)
        whole = credited(whole, found, self._algorithm, scores)
        if isinstance(self._algorithm, PPOConfig) and version < self._algorithm.critic_warmup_steps:
            # During the warm-up, `returns` train the critic, and advantages of 0 keep rewards from the policy.
            whole["advantages"] = np.zeros_like(whole["advantages"])
        logprobs = scores.get("policy_logprobs")
        return CurrentBatch(
            number, whole, found, logprobs, self._algorithm, self._seed, before, replay_before, next_update
        )

    def _recorded(self, journal: RolloutJournal, weights: Weights, *, is_begun: bool) -> RecordedBatch | None:
        """Returns the next batch from the journal, or None if it has to be sampled.

        Args:
          journal: journal of this process.
          weights: the current weights.
          is_begun: True if these weights were already trained on a part of the batch.
        """
        if not journal.is_begun:
            if weights.version:  # a checkpoint was resumed without its position in the data
                journal.restart()
            else:
                journal.begin(self._ledger, 0, self._settings)
        number, digest = self._ledger.batches, None if is_begun else weights.digest
        # A killed process may lack a record that other processes have.
        if self._share.agree("recorded batch", journal.has(number, digest)):
            return journal.replay(number)
        journal.give_up(number, digest, weights.version)
        return None

    def _state(self) -> dict[str, Any]:
        """Returns the position in the data, for a checkpoint that is being saved."""
        current = self._current
        # Within a batch, the position is before the batch, which a resumed run takes from the journal.
        within = current is not None and current.remaining > 0
        ledger = current.before if current is not None and within else self._ledger.state()
        replay = current.replay_before if current is not None and within else self._replay
        if replay.groups and self._replay_files is not None:
            self._replay_files.save(self._version, replay)
        updates = {"update": current.next_update if current is not None and within else 0, "updates": self._updates}
        if self._journal is not None:
            self._journal.position(self._version, ledger["batches"])
        return {"step": self._version, **ledger, **updates, "replayable": len(replay.groups)}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._ledger.restore(state)
        if self._replay.size and state.get("replayable") and self._replay_files is not None:
            self._replay = self._replay_files.load(state["step"], self._replay.size, self._settings)
        # With other numbers of updates, allowed by `--allow`, the rest of the batch is not defined.
        self._resumed_updates = state["update"] if state["updates"] == self._updates else 0
        if self._journal is not None:
            self._journal.begin(self._ledger, state["step"], self._settings)

    @property
    def _updates(self) -> list[int]:
        return [self._algorithm.epochs, self._algorithm.minibatches]

    def _laid_out(
        self, found: Sequence[Trajectory | None], version: int, sampling: PolicySampling
    ) -> dict[str, np.ndarray]:
        """Lays out trajectories as a batch, with the log-probabilities of the data's reference."""
        batch = batch_of(found, shapes=self._shapes, version=version, sampling=sampling)
        if (reference := self._playing().reference) is not None:
            batch[REFERENCE_LOGPROBS] = reference.logprobs(batch)
        return batch

    def _score(self, batch: Batch) -> dict[str, np.ndarray]:
        """Scores a batch before its first update, in parts of the size of an update."""
        if not self._algorithm.reads_scores:
            return {}
        parts = np.split(np.arange(self._data.batch_size), self._algorithm.minibatches)
        scored = [self._scored({name: array[part] for name, array in batch.items()}) for part in parts]
        return {name: np.concatenate([np.asarray(each[name], np.float32) for each in scored]) for name in scored[0]}

    def _scored(self, batch: Batch) -> Mapping[str, Any]:
        assert self._policy is not None, "update_weights has not been called"
        given = {name: batch[name] for name in _SCORED if name in batch}
        plan = self._plan(batch) if self._data.packed else None
        scores = self._policy.score(given if plan is None else plan.pack(given))
        names = [name for name in ("policy_logprobs", REFERENCE_LOGPROBS, "values") if name in scores]
        return {name: scores[name] if plan is None else plan.unpack(np.asarray(scores[name])) for name in names}

    def _plan(self, batch: Batch) -> PackedRows:
        return PackedRows.plan(batch["segment_ids"], self._row_counts, images_per_row(batch))

    @property
    def _version(self) -> int:
        return 0 if self._policy is None else self._policy.weights.version

    def _playing(self) -> _Play:
        if self._play is None:
            raise DataError("No policy was given yet to play with: call take_policy first.")
        return self._play


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
        """Restores the position that `state` stores.

        Raises:
          DataError: the state belongs to different rollouts.
        """
        places = ("step", "update", "updates", *Ledger().state())
        is_state = isinstance(state, Mapping) and all(name in state for name in places)
        if not is_state or any(state.get(name) != value for name, value in self._fingerprint.items()):
            raise DataError(f"The saved position {state!r} is not one of these rollouts: {self._fingerprint}.")
        self._restore(state)
