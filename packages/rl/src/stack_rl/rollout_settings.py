"""Settings of the episodes that a policy plays."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import Selected, config, to_mapping
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.plugins import registries
from stack_core.runtime.config import EngineProcessConfig
from stack_rl.environments.records import files_digest
from stack_rl.episodes import STEP_TIMEOUT_S, OnFailure
from stack_rl.reference import ReferenceConfig
from stack_rl.sampling import PolicySampling

__all__ = ["RolloutSettings"]


@config
class RolloutSettings:
    """How many episodes of an environment are played, and how the policy samples them.

    Attributes:
      environment: environment config, an entry of the registry `environments`.
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
