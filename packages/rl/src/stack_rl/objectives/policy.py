"""Shared parts of all policy-gradient objectives: log-probabilities, corrections, KL divergence, weighted sum.

An algorithm is a subclass of `PolicyConfig` that implements `token_losses`; `presets` has the published ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped
from pydantic import NonNegativeFloat, PositiveFloat

from stack_core.abi.config import changed_fields, config
from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ConfigError
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.models import LanguageModel
from stack_core.abi.objectives import Objective
from stack_rl.math import corrections
from stack_rl.math.kl import corrected, estimator_in_loss
from stack_rl.math.policy import log_ratio
from stack_rl.objectives.candidates import among_candidates
from stack_rl.objectives.entropy import token_entropies

__all__ = [
    "OF_DATA",
    "Correction",
    "PolicyConfig",
    "PolicyObjective",
    "PolicyTokens",
    "ReferencedObjective",
    "ScoredObjective",
    "TargetFigures",
    "target_figures",
]

OF_DATA: Final = "data"
"""Value of `reference` for log-probabilities that come with the batch."""

_TOKENS: Final = ("tokens", "targets", "positions", "segment_ids", "advantages", "weights", "old_logprobs")
_ROWS: Final = ("share", "real", "dropped")


@dataclass(frozen=True)
class PolicyTokens:
    """Inputs of a token loss, all [batch, seq].

    Attributes:
      logprobs: log p(token) under the policy that is trained.
      log_ratio: log p - log p_old at sampled tokens, 0 elsewhere. p_old is the behaviour policy that sampled them; with
        a correction, it is the current policy before the update.
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
class Correction:
    """Importance weights: the ratio of the policy to the behaviour that sampled the tokens, without a gradient.

    Attributes:
      kind: "truncate" caps ratios at `high`; "mask" drops tokens whose ratio is outside `low` to `high`.
      level: ratio of a token: its own ("token"), or its sequence's geometric mean ("sequence_mean") or product
        ("sequence_product").
      low: smallest ratio kept by "mask"; 0 sets no lower bound.
      high: largest ratio, for both kinds.

    Source: see `stack_rl.math.corrections`.
    """

    kind: Literal["truncate", "mask"] = "truncate"
    level: corrections.Level = "token"
    low: NonNegativeFloat = 0.0
    high: PositiveFloat = 2.0

    def __post_init__(self) -> None:
        if self.low >= self.high or (self.low and self.kind == "truncate"):
            raise ConfigError(
                f"objective.correction keeps ratios from {self.low} to {self.high} by {self.kind!r}. Give low < high, "
                "and low only with kind: mask."
            )

    def weights(self, log_ratio: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> Float[Array, "batch seq"]:
        leveled = corrections.leveled(log_ratio, mask, segment_ids, self.level)
        if self.kind == "truncate":
            return corrections.truncate(leveled, cap=self.high)
        return corrections.mask(leveled, low=self.low, high=self.high)


@config
class PolicyConfig:
    """A policy gradient, on data with advantages, token weights and log-probabilities at sampling time.

        loss = sum_t w_t (c_t l_t + kl * k_t - entropy * H_t)

    The weights w come with the batch, so the sum does not depend on how the batch is packed or split. l is the
    algorithm's token loss, c the correction, k an estimate of the KL divergence from the reference, and H the entropy
    of the distribution that the token was sampled from.

    Attributes:
      name: key of the algorithm in the registry `objectives`; subclasses set a default.
      correction: c, the ratio of the policy before the update to the behaviour, by default capped at 2. The algorithm's
        own ratios are then relative to the policy before the update; with one update per batch they are 1 and never
        clipped. With None, they are relative to the behaviour and c is 1.
      kl: weight of the KL divergence from the reference; 0 needs no reference.
      kl_estimator: "k2", whose gradient equals the divergence's gradient on policy, or "k3". "k1" is refused.
      kl_corrected: multiply k by the ratio, for tokens sampled by another policy.
      reference: reference model. "init" (the model at the start) and "run:DIRECTORY" are placed on the trainer's mesh;
        "data" uses the log-probabilities computed by `data.reference` on a separate mesh.
      entropy: weight of the entropy bonus, which prevents early collapse of the policy.
      advantage, weights: the algorithm's choice of `data.advantage` and `data.weights`, which `stack rl audit` checks.
    """

    name: str
    correction: Correction | None = Correction()
    kl: NonNegativeFloat = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    kl_corrected: bool = False
    reference: str = "init"
    entropy: NonNegativeFloat = 0.0

    advantage: ClassVar[str] = "group"
    weights: ClassVar[str] = "sequence"
    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**dict.fromkeys(_TOKENS, "batch seq"), **dict.fromkeys(_ROWS, "batch")}
    )

    def __post_init__(self) -> None:
        estimator_in_loss(self.kl_estimator)  # raises for k1
        of_kl = ("kl_estimator", "kl_corrected", "reference")
        if not self.kl and (unread := changed_fields(self, of_kl)):
            raise ConfigError(
                f"objective.kl is 0, so objective.{' and objective.'.join(unread)} would have no effect. Set "
                "objective.kl, or leave that out."
            )

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
        if not self.kl:
            return PolicyObjective(self)
        return ScoredObjective(self) if self.reference == OF_DATA else ReferencedObjective(self)


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """The objective of a `PolicyConfig` without a reference model."""

    config: PolicyConfig
    inputs: ClassVar[Mapping[str, str]] = PolicyConfig.inputs
    shown_metrics: ClassVar[tuple[str, ...]] = ("reward", "flat_groups", "unparsed", "truncated")

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # the loss is not random
        return self._loss(model, batch, None)

    def _loss(
        self,
        model: LanguageModel,
        batch: Mapping[str, jax.Array],
        reference: LanguageModel | None,
        critic: Callable[[jax.Array], jax.Array] | None = None,
    ) -> tuple[jax.Array, Metrics]:
        settings, drawn = self.config, batch["targets"] != IGNORED_TARGET
        segment_ids, count = batch["segment_ids"], jnp.sum(drawn.astype(batch["weights"].dtype))
        hidden, logprobs, entropies = target_figures(model, batch, entropies=settings.entropy > 0)
        moved = log_ratio(logprobs, batch["old_logprobs"], drawn)
        # With a correction, c is the ratio to the behaviour; the algorithm's own ratio is 1 and only has a gradient.
        moves = moved if settings.correction is None else log_ratio(logprobs, jax.lax.stop_gradient(logprobs), drawn)
        tokens = PolicyTokens(logprobs, moves, batch["advantages"], drawn, segment_ids)
        losses, report = settings.token_losses(tokens), dict(settings.metrics(tokens))
        if settings.correction is not None:
            weights = settings.correction.weights(moved, drawn, segment_ids)
            losses, report["correction"] = weights * losses, weights
            report["masked"] = (weights == 0).astype(weights.dtype)
        if (of_reference := self._of_reference(batch, reference)) is not None:
            divergence = estimator_in_loss(settings.kl_estimator)(logprobs, of_reference)
            divergence = corrected(divergence, moved) if settings.kl_corrected else divergence
            losses, report["kl"] = losses + settings.kl * divergence, divergence
        if entropies is not None:
            losses, report["entropy"] = losses - settings.entropy * entropies, entropies
        if critic is not None:
            values = critic(hidden).astype(logprobs.dtype)
            of_values = settings.value_losses(values, batch["old_values"], batch["returns"])
            losses, report["value"], report["value_loss"] = losses + of_values, values, of_values
        report |= {"logprob": logprobs, "mismatch": jnp.abs(moved), "ratio": jnp.exp(moved)}
        # Each row's share is 1 / rows of the batch. Divided and then weighted by its share, each microbatch
        # contributes its plain sum, and all of them add up to the sum over the batch.
        share = jnp.sum(batch["share"])
        loss = Metric.mean(jnp.sum(jnp.where(drawn, batch["weights"] * losses, 0.0)) / share, share)
        return loss.value, {
            "loss": loss,
            **{name: _mean(values, drawn, count) for name, values in report.items()},
            "largest_mismatch": Metric.max(jnp.max(jnp.abs(moved))),
            "effective_share": Metric.mean(corrections.effective_share(moved, drawn), count),
            **_row_means(batch),
        }

    def _of_reference(
        self, batch: Mapping[str, jax.Array], reference: LanguageModel | None
    ) -> Float[Array, "batch seq"] | None:
        """Returns the reference's log-probabilities of the targets; None without a reference.

        Raises:
          ConfigError: the data has a reference that the objective does not use.
        """
        there, settings = "reference_logprobs" in batch, self.config
        if there and not (settings.kl and settings.reference == OF_DATA):
            raise ConfigError(
                f"The data has a reference (data.reference), which the objective does not use: objective.kl is "
                f"{settings.kl}, and objective.reference is {settings.reference!r}. Set objective.kl and "
                "objective.reference: data, or leave data.reference out."
            )
        if there:
            return batch["reference_logprobs"].astype(batch["old_logprobs"].dtype)
        return None if reference is None else target_figures(reference, batch).logprobs


@dataclass(frozen=True)
class ReferencedObjective(PolicyObjective):
    """The objective of a `PolicyConfig` with a reference model on the trainer's mesh."""

    @property
    def auxiliary_models(self) -> Mapping[str, str]:
        return {"reference": self.config.reference}

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key
        return self._loss(model, batch, auxiliary["reference"])


@dataclass(frozen=True)
class ScoredObjective(PolicyObjective):
    """The objective of a `PolicyConfig` with reference log-probabilities in the batch."""

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType({**PolicyConfig.inputs, "reference_logprobs": "batch seq"})


class TargetFigures(NamedTuple):
    """Hidden states, target log-probabilities and, if requested, entropies of the sampling distributions."""

    hidden: Float[Array, "batch seq embed"]
    logprobs: Float[Array, "batch seq"]
    entropies: Float[Array, "batch seq"] | None


def target_figures(model: LanguageModel, batch: Mapping[str, jax.Array], *, entropies: bool = False) -> TargetFigures:
    """Computes log-probabilities, and optionally entropies, of the targets, over their candidates if the batch has any.

    The logits of a whole batch are never in memory.
    """
    hidden, dtype = model(batch["tokens"], batch["positions"], batch["segment_ids"]).hidden, batch["old_logprobs"].dtype
    head, targets = model.head(), batch["targets"]
    if "candidates" in batch:
        # Ignored targets are -100, not a token id; callers mask their results.
        logprobs, found = among_candidates(head, hidden, jnp.maximum(targets, 0), batch["candidates"])
    else:
        logprobs = -head.cross_entropy(hidden, targets, ignore_index=IGNORED_TARGET, reduction="none")
        found = token_entropies(head, hidden) if entropies else None
    return TargetFigures(
        hidden, logprobs.astype(dtype), found.astype(dtype) if entropies and found is not None else None
    )


def _mean(values: jax.Array, mask: jax.Array, count: jax.Array) -> Metric:
    total = jnp.sum(jnp.where(mask, values.astype(count.dtype), 0))
    # Means over microbatches are combined in proportion to their numbers of tokens.
    return Metric.mean(total / jnp.maximum(count, 1), count)


def _row_means(batch: Mapping[str, jax.Array]) -> Metrics:
    """Returns means over episodes of the batch's other row arrays, and the number of dropped episodes."""
    real = batch["real"]
    count = jnp.sum(real)
    facts = {name: value for name, value in batch.items() if value.ndim == 1 and name not in PolicyConfig.inputs}
    return {
        **{name: Metric.mean(jnp.sum(value * real) / jnp.maximum(count, 1.0), count) for name, value in facts.items()},
        "dropped": Metric.sum(jnp.sum(batch["dropped"])),
    }
