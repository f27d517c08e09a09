"""`data.name: rollouts`: the settings of episodes that the policy itself generates in an environment."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import Selected, changed_fields, config, to_mapping
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.plugins import registries
from stack_core.abi.policy import PolicyBatches
from stack_core.runtime.config import EngineProcessConfig
from stack_rl.environments.records import files_digest
from stack_rl.episode_images import check_image_data, image_shapes
from stack_rl.episodes import STEP_TIMEOUT_S, OnFailure
from stack_rl.experience import batch_shapes
from stack_rl.objectives.policy import OF_DATA, PolicyConfig
from stack_rl.reference import ReferenceConfig
from stack_rl.reward_parts import part_shapes
from stack_rl.routing import check_routing_replay, mixture_sizes
from stack_rl.sampling import PolicySampling
from stack_rl.updates import check_minibatches

__all__ = ["PolicyRollouts", "RolloutData"]


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

    def build(self, *, seed: int, model: Any) -> PolicyBatches:
        from stack_rl.rollout_batches import RolloutBatches  # imports this module

        experts = mixture_sizes(model) if self.data.routing_replay else None
        shapes = self.shapes(self.data.batch_size, model, experts)
        return RolloutBatches(self.data, self.algorithm, seed=seed, shapes=shapes)


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
