"""`data.name: rollouts`: batches of episodes that the policy itself generates in an environment."""

from dataclasses import dataclass
from typing import Any, Literal

from stack_core.abi.config import changed_fields, config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_rl.episode_images import check_image_data, image_shapes
from stack_rl.experience import batch_shapes
from stack_rl.objectives.policy import OF_DATA, PolicyConfig
from stack_rl.reward_parts import part_shapes
from stack_rl.rollout_batches import RolloutBatches
from stack_rl.rollout_settings import RolloutSettings
from stack_rl.routing import check_routing_replay, mixture_sizes
from stack_rl.updates import check_minibatches

__all__ = ["PolicyRollouts", "RolloutData"]


@config
class RolloutData(RolloutSettings):
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
      name: selects this data in the registry `data`.
    """

    name: Literal["rollouts"] = "rollouts"

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

    def build(self, *, seed: int, model: Any) -> RolloutBatches:
        experts = mixture_sizes(model) if self.data.routing_replay else None
        shapes = self.shapes(self.data.batch_size, model, experts)
        return RolloutBatches(self.data, self.algorithm, seed=seed, shapes=shapes)


def _plays_itself(environment: Any) -> bool:
    """Returns whether episodes may have several branches, and actions their own temperatures."""
    return getattr(environment, "plays_itself", False)


def _check_positions(model: Any, data: RolloutSettings) -> None:
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
