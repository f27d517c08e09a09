"""Batches of episodes that the policy plays, and their position in checkpoints."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.data import Batch, Shapes
from stack_core.abi.engines import Engine, checked_engine
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.plugins import registries
from stack_core.abi.policy import PolicyBatches
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.digest import tree_digest
from stack_core.runtime.gathering import gathered
from stack_core.runtime.processes import joined
from stack_rl.choosing import ChoosesTasks
from stack_rl.concurrent import ConcurrentPlayer
from stack_rl.contracts import Tasks, Trajectory
from stack_rl.engine_process import open_in_process
from stack_rl.episode_images import IMAGE_COUNTS, IMAGE_INPUTS, images_per_row
from stack_rl.episodes import Attempt, Player
from stack_rl.experience import REFERENCE_LOGPROBS, batch_of, credited, update_batch
from stack_rl.groups import Group, Ledger, trained_on
from stack_rl.objectives.policy import PolicyConfig
from stack_rl.objectives.ppo import PPOConfig
from stack_rl.objectives.sampled import SAMPLING_INPUTS
from stack_rl.pacing import Pacing
from stack_rl.packing import PackedRows, row_counts
from stack_rl.placing import ShardedCheckpoint
from stack_rl.progress import RewardMonitor
from stack_rl.reference import Reference
from stack_rl.replay import ReplayBuffer, ReplayFiles
from stack_rl.rollout_journal import RecordedBatch, RolloutJournal
from stack_rl.rollout_settings import RolloutSettings
from stack_rl.samples import MOST_SAMPLES, SAMPLES_FILE, write_samples
from stack_rl.sampling import AS_MODEL, PolicySampling
from stack_rl.share import Share
from stack_rl.supply import AheadSupply, Rounds, Supply, TogetherSupply, Weights
from stack_rl.updates import CurrentBatch, mean_kl

__all__ = ["RolloutBatches", "RolloutIterator"]

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

    def __init__(self, data: RolloutSettings, algorithm: PolicyConfig, *, seed: int, shapes: Shapes) -> None:
        self._data, self._algorithm = data, algorithm
        self._seed, self._share, self._shapes = seed, Share(joined()), shapes
        # Groups of another number of processes are divided in another way.
        count = self._share.processes.count
        self._settings = data.draw_digest if count == 1 else f"{count}-{data.draw_digest}"
        self._ledger = Ledger()
        self._play: _Play | None = None
        self._policy: _Policy | None = None
        self._current: CurrentBatch | None = None
        self._resumed_updates = 0
        self._journal: RolloutJournal | None = None
        self._directory: Path | None = None
        self._replay = ReplayBuffer(data.replay_groups)
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
