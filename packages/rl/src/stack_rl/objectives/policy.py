"""Algorithms of policy gradients as config values, and their objective: corrections, KL divergence, weighted sum.

An algorithm is a subclass of `PolicyConfig` that implements `token_losses`; `presets` has the published ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import changed_fields, config, parse, to_mapping
from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ConfigError
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.models import LanguageModel, Outputs
from stack_core.abi.objectives import Objective
from stack_rl.episode_images import image_inputs
from stack_rl.math import corrections
from stack_rl.math.kl import corrected, estimator_in_loss
from stack_rl.math.policy import log_ratio
from stack_rl.objectives.heads import scalar_head
from stack_rl.objectives.sampled import sampled_figures
from stack_rl.objectives.settings import Correction, Overlong
from stack_rl.routing import replayed_experts

__all__ = [
    "OF_DATA",
    "Advantage",
    "LossAggregation",
    "PolicyConfig",
    "PolicyObjective",
    "PolicyTokens",
    "TargetFigures",
    "target_figures",
]

Advantage = Literal["group", "centred", "leave_one_out", "whitened", "returns", "gae"]
LossAggregation = Literal["sequence", "token", "constant", "sequence_sum", "prompt", "sum"]

OF_DATA: Final = "data"
"""Value of `reference` for log-probabilities that come with the batch."""

_TOKENS: Final = ("tokens", "targets", "positions", "segment_ids", "advantages", "weights", "behaviour_logprobs")
_ROWS: Final = ("share", "real", "dropped")
_INPUTS: Final = MappingProxyType({**dict.fromkeys(_TOKENS, "batch seq"), **dict.fromkeys(_ROWS, "batch")})


@dataclass(frozen=True)
class PolicyTokens:
    """Inputs of a token loss, all [batch, seq].

    Attributes:
      logprobs: log p(token) under the policy that is trained.
      log_ratio: log p - log p_old at sampled tokens, 0 elsewhere. p_old is the policy before the first update of the
        batch; without a correction, it is the behaviour that sampled them.
      advantages: A, without a gradient.
      drawn: mask of sampled tokens; losses at other tokens are ignored.
      segment_ids: sequence of each token within its row; 0 is padding.
    """

    logprobs: Float[Array, "batch seq"]
    log_ratio: Float[Array, "batch seq"]
    advantages: Float[Array, "batch seq"]
    drawn: Bool[Array, "batch seq"]
    segment_ids: Int[Array, "batch seq"]


@config
class PolicyConfig:
    """An algorithm: estimator of advantages, weights of tokens, updates per batch, and the loss of each token.

        loss = sum_t w_t (c_t l_t + kl * k_t - entropy * H_t)

    l is the algorithm's token loss, w the weight of a token (`loss_aggregation`), c the correction, k an estimate of
    the KL divergence from the reference, and H the entropy of the distribution that the token was sampled from. The
    weights come with the batch, so the sum does not depend on how the batch is packed or split.

    A batch of episodes is used for `epochs * minibatches` updates. The ratio r in l is relative to the policy before
    the first of them, so it is 1 in the first update and is clipped only in later ones. Without a correction, r is
    relative to the behaviour that sampled the tokens, the sampler.

    The defaults of a subclass are its paper's values, except for `correction`: papers assume that the sampler is the
    policy before the first update, and then c is 1.

    Attributes:
      name: key of the algorithm in the registry `objectives`; subclasses set a default.
      advantage: advantage estimator. "group": reward minus the group's mean, divided by the group's standard deviation;
        "centred": reward minus the group's mean; "leave_one_out": reward minus the mean of the group's other rewards;
        "whitened": "centred" divided by its standard deviation over the batch; "returns": reward, whitened over the
        sampled tokens of the batch; "gae": generalized advantage estimation per token, which needs a critic.
      loss_aggregation: w. "sequence": equal weight per episode; "token": equal weight per token; "constant": 1 / (rows
        * data.seq_tokens); "sequence_sum": 1 / rows; "prompt": equal weight per task, and per token within a task;
        "sum": 1. Sums are over the episodes of an update.
      correction: c, the ratio of the policy before the first update to the behaviour, by default capped at 2.
      kl: weight of the KL divergence from the reference; 0 needs no reference.
      kl_in: "loss" adds kl * k to the loss, "reward" subtracts kl * k from the reward of each token.
      kl_estimator: in the loss "k2", whose gradient equals the divergence's gradient on policy, or "k3"; in the reward
        "k1". Other combinations are refused.
      kl_corrected: multiply k in the loss by the ratio, for tokens sampled by another policy.
      reference: reference model. "init" (the model at the start) and "run:DIRECTORY" are placed on the trainer's mesh;
        "data" uses the log-probabilities computed by `data.reference` on a separate mesh.
      entropy: weight of the entropy bonus, which prevents early collapse of the policy.
      refill_rounds: replace groups whose rewards are all equal by newly sampled groups (DAPO's dynamic sampling), at
        most `refill_rounds * data.groups` per batch. If that is not enough, groups with equal rewards fill the batch
        and a warning reports the rewards found. 0 replaces none.
      overlong: handling of answers near their token limit; None treats them like others.
      epochs: number of passes over a batch.
      minibatches: number of updates per pass, each on an equal part of the episodes in random order.
      target_kl: skips the remaining updates of a batch once the KL divergence of the policy from the policy before the
        first update, estimated on the next minibatch, exceeds this value; None never skips.
    """

    name: str
    advantage: Advantage = "group"
    loss_aggregation: LossAggregation = "sequence"
    correction: Correction | None = Correction()
    kl: NonNegativeFloat = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    kl_corrected: bool = False
    reference: str = "init"
    entropy: NonNegativeFloat = 0.0
    refill_rounds: NonNegativeInt = 0
    overlong: Overlong | None = None
    epochs: PositiveInt = 1
    minibatches: PositiveInt = 1
    target_kl: PositiveFloat | None = None

    has_critic: ClassVar[bool] = False
    reads_ratio: ClassVar[bool] = True
    reads_rewards: ClassVar[bool] = True
    of_ratio: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Refuses parts of the algorithm without an effect, and contradictory ones."""
        if (self.advantage == "gae") != self.has_critic:
            has = "trains a critic, which only 'gae' reads" if self.has_critic else "has no critic, which 'gae' reads"
            advice = "Set objective.advantage: gae, or choose an algorithm without a critic, such as grpo."
            advice = advice if self.has_critic else "Choose objective.name: ppo, or another objective.advantage."
            raise ConfigError(f"objective.advantage is {self.advantage!r}, but {self.name} {has}. {advice}")
        self._check_kl()
        if self.updates == 1:
            self._refuse_unread(("target_kl",), "A batch has one update", "epochs or objective.minibatches")
            if self.correction is not None:
                reason = "A batch has one update, in which all ratios are 1"
                self._refuse_unread(self.of_ratio, reason, "epochs or objective.minibatches")
        elif not self.reads_ratio and self.correction is None:
            raise ConfigError(
                f"objective.epochs is {self.epochs} and objective.minibatches is {self.minibatches}, but the loss of "
                f"{self.name} has no ratio, so later updates would take the samples of an earlier policy for its own. "
                "Set objective.correction, or set both to 1."
            )

    def _check_kl(self) -> None:
        if not self.kl:
            # A default is not a request: a subclass with kl > 0 may also have another estimator.
            self._refuse_unread(("kl_in", "kl_estimator", "kl_corrected", "reference"), "objective.kl is 0", "kl")
        elif self.kl_in == "loss":
            estimator_in_loss(self.kl_estimator)  # raises for k1
        elif self.kl_estimator != "k1":
            raise ConfigError(
                f"objective.kl_estimator is {self.kl_estimator!r} and objective.kl_in is 'reward': subtracted from a "
                "reward, only k1 has the gradient of the KL divergence. Set kl_estimator: k1, or kl_in: loss."
            )
        elif self.kl_corrected:
            raise ConfigError(
                "objective.kl_corrected would have no effect with kl_in: reward, which the correction of the loss "
                "already covers. Leave it out."
            )

    def _refuse_unread(self, fields: Sequence[str], reason: str, remedy: str) -> None:
        if unread := changed_fields(self, fields):
            raise ConfigError(
                f"{reason}, so objective.{' and objective.'.join(unread)} would have no effect. Set "
                f"objective.{remedy}, or leave that out."
            )

    @property
    def updates(self) -> int:
        """Number of updates per batch."""
        return self.epochs * self.minibatches

    @property
    def has_old_logprobs(self) -> bool:
        """True if batches have the log-probabilities of the policy before the first of several updates."""
        return self.updates > 1 and self.reads_ratio and self.correction is not None

    @property
    def reads_scores(self) -> bool:
        """True if batches need `PolicyObjective.scores` before their first update."""
        return self.scores_policy or self.has_critic or (self.has_reward_kl and self.reference != OF_DATA)

    @property
    def scores_policy(self) -> bool:
        """True if the policy scores a batch before its first update."""
        return self.has_old_logprobs or self.target_kl is not None

    @property
    def has_reward_kl(self) -> bool:
        """True if the KL divergence is subtracted from the reward."""
        return self.kl > 0 and self.kl_in == "reward"

    @property
    def inputs(self) -> Mapping[str, str]:
        """Batch arrays that the objective reads."""
        more = [
            *(["old_logprobs"] if self.has_old_logprobs else []),
            *(["old_values", "returns"] if self.has_critic else []),
            *(["reference_logprobs"] if self.kl and self.reference == OF_DATA else []),
        ]
        return {**_INPUTS, **dict.fromkeys(more, "batch seq")}

    def departures(self) -> list[str]:
        """Lists the settings that differ from the paper's, such as "objective.kl: 0.0 (grpo has 0.04)"."""
        paper, own = to_mapping(parse(type(self), {"name": self.name})), to_mapping(self)
        return [
            f"objective.{field}: {_format(value)} ({self.name} has {_format(paper[field])})"
            for field, value in own.items()
            if value != paper[field]
        ]

    def token_losses(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        """Computes l, the loss of each sampled token."""
        raise NotImplementedError

    def metrics(self, tokens: PolicyTokens) -> Mapping[str, Shaped[Array, "batch seq"]]:
        """Returns additional per-token metrics, each reported as its mean over sampled tokens."""
        del tokens
        return {}

    def value_losses(
        self,
        values: Float[Array, "batch seq"],
        old_values: Float[Array, "batch seq"],
        returns: Float[Array, "batch seq"],
    ) -> Float[Array, "batch seq"]:
        """Computes the critic's loss per token, for algorithms with a critic."""
        raise NotImplementedError

    def build(self) -> Objective:
        return PolicyObjective(self)


def _format(value: Any) -> str:
    return "null" if value is None else str(value)


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """The objective of a `PolicyConfig`."""

    config: PolicyConfig
    shown_metrics: ClassVar[tuple[str, ...]] = ("reward", "flat_groups", "unparsed", "truncated")
    rate_metrics: ClassVar[tuple[str, ...]] = ("tokens",)

    @property
    def inputs(self) -> Mapping[str, str]:  # pyrefly: ignore  # depends on the config, unlike the class variable
        return self.config.inputs

    @property
    def notes(self) -> tuple[str, ...]:
        departures = self.config.departures()
        if not departures:
            return (f"{self.config.name} as in its paper",)
        return (f"{self.config.name}, with other settings than in its paper:", *(f"  {each}" for each in departures))

    @property
    def auxiliary_models(self) -> Mapping[str, str | Callable[..., Any]]:
        needs_reference = self.config.kl and self.config.reference != OF_DATA
        return {
            **({"reference": self.config.reference} if needs_reference else {}),
            **({"critic": scalar_head} if self.config.has_critic else {}),
        }

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # the loss is not random
        settings, drawn = self.config, batch["targets"] != IGNORED_TARGET
        segment_ids, count = batch["segment_ids"], jnp.sum(drawn.astype(batch["weights"].dtype))
        hidden, logprobs, entropies, facts = target_figures(model, batch, entropies=settings.entropy > 0)
        # Log ratios of the policy to the behaviour, and of the policy before the first update to the behaviour.
        moved = log_ratio(logprobs, batch["behaviour_logprobs"], drawn)
        if "old_logprobs" in batch and settings.has_old_logprobs:
            ratios = log_ratio(logprobs, batch["old_logprobs"], drawn)
            mismatch = log_ratio(batch["old_logprobs"], batch["behaviour_logprobs"], drawn)
        elif settings.correction is not None and settings.updates == 1:
            # The policy is still the one before the first update: the ratio is 1 and only has a gradient.
            ratios, mismatch = log_ratio(logprobs, jax.lax.stop_gradient(logprobs), drawn), moved
        else:
            ratios, mismatch = moved, moved
        tokens = PolicyTokens(logprobs, ratios, batch["advantages"], drawn, segment_ids)
        losses, report = settings.token_losses(tokens), dict(settings.metrics(tokens))
        if settings.correction is not None:
            weights = settings.correction.weights(mismatch, drawn, segment_ids)
            losses, report["correction"] = weights * losses, weights
            report["masked"] = (weights == 0).astype(weights.dtype)
        if (of_reference := self._of_reference(batch, auxiliary.get("reference"))) is not None:
            divergence = estimator_in_loss(settings.kl_estimator)(logprobs, of_reference)
            divergence = corrected(divergence, moved) if settings.kl_corrected else divergence
            losses, report["kl"] = losses + settings.kl * divergence, divergence
        if entropies is not None:
            losses, report["entropy"] = losses - settings.entropy * entropies, entropies
        if settings.has_critic:
            values = auxiliary["critic"](hidden).astype(logprobs.dtype)
            of_values = settings.value_losses(values, batch["old_values"], batch["returns"])
            losses, report["value"], report["value_loss"] = losses + of_values, values, of_values
        if settings.updates > 1 and settings.reads_ratio:
            report["update_kl"] = jnp.expm1(ratios) - ratios  # k3 of samples of the policy before the first update
        report |= {"logprob": logprobs, "mismatch": jnp.abs(mismatch), "ratio": jnp.exp(moved)}
        # Each row's share is 1 / rows of the update. Divided and then weighted by its share, each microbatch
        # contributes its plain sum, and all of them add up to the sum over the update.
        share = jnp.sum(batch["share"])
        loss = Metric.mean(jnp.sum(jnp.where(drawn, batch["weights"] * losses, 0.0)) / share, share)
        return loss.value, {
            "loss": loss,
            **{name: _mean(values, drawn, count) for name, values in report.items()},
            "largest_mismatch": Metric.max(jnp.max(jnp.abs(mismatch))),
            "tokens": Metric.sum(count),
            "effective_share": Metric.mean(corrections.effective_share(moved, drawn), count),
            **_routing_mismatch(facts, batch),
            **_row_means(batch),
        }

    def scores(
        self, model: LanguageModel, outputs: Outputs, batch: Mapping[str, jax.Array], **auxiliary: Any
    ) -> Mapping[str, jax.Array]:
        """Computes the host's inputs before the first update of a batch.

        Returns:
          "policy_logprobs" of the targets as they were sampled; "reference_logprobs" for a KL
          divergence in the reward; the critic's "values" before each target. All float32[batch, seq].
        """
        found: dict[str, jax.Array] = {}
        if self.config.scores_policy:
            found["policy_logprobs"] = sampled_figures(model.head(), outputs.hidden, batch).logprobs
        if self.config.has_reward_kl and "reference" in auxiliary:
            found["reference_logprobs"] = _reference_figures(auxiliary["reference"], batch).logprobs
        if self.config.has_critic:
            found["values"] = auxiliary["critic"](outputs.hidden)
        return {name: each.astype(jnp.float32) for name, each in found.items()}

    def _of_reference(
        self, batch: Mapping[str, jax.Array], reference: LanguageModel | None
    ) -> Float[Array, "batch seq"] | None:
        """Returns the reference's log-probabilities of the targets for a KL term of the loss; else None."""
        if not self.config.kl or self.config.kl_in == "reward":
            return None
        if self.config.reference == OF_DATA:
            return batch["reference_logprobs"].astype(batch["behaviour_logprobs"].dtype)
        assert reference is not None, "an auxiliary model of this objective"
        return _reference_figures(reference, batch).logprobs


class TargetFigures(NamedTuple):
    """Hidden states, target log-probabilities, entropies of the sampling distributions if requested, model's facts."""

    hidden: Float[Array, "batch seq embed"]
    logprobs: Float[Array, "batch seq"]
    entropies: Float[Array, "batch seq"] | None
    facts: Mapping[str, Any]


def target_figures(model: LanguageModel, batch: Mapping[str, jax.Array], *, entropies: bool = False) -> TargetFigures:
    """Computes log-probabilities, and optionally entropies, of the targets as they were sampled; see `sampled_figures`.

    The logits of a whole batch are never in memory. A batch with `experts` is computed by these experts, and a batch
    with images with their pixels.
    """
    given = {**replayed_experts(batch), **image_inputs(batch)}
    outputs = model(batch["tokens"], batch["positions"], batch["segment_ids"], **given)
    dtype = batch["behaviour_logprobs"].dtype
    logprobs, found = sampled_figures(model.head(), outputs.hidden, batch, entropies=entropies)
    entropy = None if found is None else found.astype(dtype)
    return TargetFigures(outputs.hidden, logprobs.astype(dtype), entropy, outputs.facts)


def _reference_figures(reference: LanguageModel, batch: Mapping[str, jax.Array]) -> TargetFigures:
    """Computes `target_figures` of another model than the policy, whose routers choose for themselves.

    Raises:
      ConfigError: the batch has images, and the model reads text only.
    """
    if image_inputs(batch) and not hasattr(reference, "image_features"):
        raise ConfigError(
            "The episodes have images (data.row_images), but the model in objective.reference reads text only. Name a "
            "run of a model like the policy."
        )
    return target_figures(reference, {name: array for name, array in batch.items() if name != "experts"})


def _routing_mismatch(statistics: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> Metrics:
    """Returns the fraction of replayed tokens and layers for which the policy's routers would choose other experts."""
    if "routing_mismatch" not in statistics:
        return {}
    tokens = jnp.sum(jnp.any(batch["experts"] >= 0, axis=(2, 3)).astype(jnp.float32))
    return {"routing_mismatch": Metric.mean(statistics["routing_mismatch"], tokens)}


def _mean(values: jax.Array, mask: jax.Array, count: jax.Array) -> Metric:
    total = jnp.sum(jnp.where(mask, values.astype(count.dtype), 0))
    # Means over microbatches are combined in proportion to their numbers of tokens.
    return Metric.mean(total / jnp.maximum(count, 1), count)


def _row_means(batch: Mapping[str, jax.Array]) -> Metrics:
    """Returns means over episodes of the batch's other row arrays, and the number of dropped episodes."""
    real = batch["real"]
    count = jnp.sum(real)
    facts = {name: value for name, value in batch.items() if value.ndim == 1 and name not in _INPUTS}
    return {
        **{name: Metric.mean(jnp.sum(value * real) / jnp.maximum(count, 1.0), count) for name, value in facts.items()},
        "dropped": Metric.sum(jnp.sum(batch["dropped"])),
    }
