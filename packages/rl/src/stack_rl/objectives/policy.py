"""What all policy-gradient objectives share: log-probabilities, corrections, the KL divergence, the weighted sum.

An algorithm is a subclass of `PolicyConfig` with one method, the loss of each token; `presets` has those of papers.
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
from stack_core.abi.training import Objective
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
"""The reference whose log-probabilities come with the batch."""

_TOKENS: Final = ("tokens", "targets", "positions", "segment_ids", "advantages", "weights", "old_logprobs")
_ROWS: Final = ("share", "real", "dropped")


@dataclass(frozen=True)
class PolicyTokens:
    """What the loss of each token is made of; all [batch, seq].

    Attributes:
      logprobs: log p(token) by the policy that is trained.
      log_ratio: log p - log p_old, 0 where no token was drawn; p_old is the behaviour that drew them, or, with a
        correction, the policy itself before the update.
      advantages: A, constants.
      drawn: the tokens that the policy drew; what the loss is elsewhere has no weight.
      segment_ids: the sequence of each token within its row; 0 is padding.
    """

    logprobs: Float[Array, "batch seq"]
    log_ratio: Float[Array, "batch seq"]
    advantages: Float[Array, "batch seq"]
    drawn: Bool[Array, "batch seq"]
    segment_ids: Int[Array, "batch seq"]


@config
class Correction:
    """Weighs tokens by the ratio of the policy to the behaviour that drew them, a constant to the gradient.

    Attributes:
      kind: "truncate" caps ratios at `high`; "mask" leaves tokens out whose ratio is not within `low` and `high`.
      level: whose ratio a token has: its own ("token"), the geometric mean or the product of its sequence's.
      low: of "mask".
      high: of both.

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

    def weights(self, log_ratio: jax.Array, drawn: jax.Array, segment_ids: jax.Array) -> Float[Array, "batch seq"]:
        leveled = corrections.leveled(log_ratio, drawn, segment_ids, self.level)
        if self.kind == "truncate":
            return corrections.truncate(leveled, cap=self.high)
        return corrections.mask(leveled, low=self.low, high=self.high)


@config
class PolicyConfig:
    """A policy gradient, on data with advantages, weights and the log-probabilities by which tokens were drawn.

        loss = sum_t w_t (c_t l_t + kl * k_t - entropy * H_t)

    The weights w come with the batch, so that the sum is the same however a batch is laid out or cut up; l is the
    algorithm's own loss of a token, c the correction, k an estimate of the divergence from the reference, H the entropy
    of the distribution that the token was drawn from.

    Attributes:
      name: of the algorithm in the registry `objectives`; subclasses give it a default.
      correction: c, the ratio to the behaviour of the policy before the update, at most 2 by default. The algorithm's
        own ratios are then those to that policy, 1 at its only step, so that none is clipped. With None they are those
        to the behaviour, and c is 1.
      kl: weight of the divergence from the reference; 0 needs no reference.
      kl_estimator: "k2", whose gradient is that of the divergence while the policy draws its own tokens, or "k3".
      kl_corrected: weigh k by the ratio, for tokens that another policy drew.
      reference: "init", the model as it was at the start, or "run:DIRECTORY", which lie on the trainer's mesh; "data"
        reads what `data.reference` computed on a separate mesh.
      entropy: weight of the entropy, which keeps a policy from settling early.
      advantage, weights: what the algorithm's paper asks of the data, `data.advantage` and `data.weights`.
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
        estimator_in_loss(self.kl_estimator)  # refuses k1, and says why
        of_kl = ("kl_estimator", "kl_corrected", "reference")
        if not self.kl and (unread := changed_fields(self, of_kl)):
            raise ConfigError(
                f"objective.kl is 0, so objective.{' and objective.'.join(unread)} would not act. Set objective.kl, or "
                "leave that out."
            )

    def token_losses(self, tokens: PolicyTokens) -> Float[Array, "batch seq"]:
        """l: what to minimize for each token that was drawn."""
        raise NotImplementedError

    def metrics(self, tokens: PolicyTokens) -> Mapping[str, Shaped[Array, "batch seq"]]:
        """What else to report, each a mean over the tokens that were drawn."""
        del tokens
        return {}

    def value_losses(
        self,
        values: Float[Array, "batch seq"],
        old_values: Float[Array, "batch seq"],
        returns: Float[Array, "batch seq"],
    ) -> Float[Array, "batch seq"]:
        """What to minimize for the critic of an algorithm that has one."""
        raise NotImplementedError

    def build(self) -> Objective:
        if not self.kl:
            return PolicyObjective(self)
        return ScoredObjective(self) if self.reference == OF_DATA else ReferencedObjective(self)


@dataclass(frozen=True)
class PolicyObjective:
    """The objective of a `PolicyConfig` without a reference."""

    config: PolicyConfig
    inputs: ClassVar[Mapping[str, str]] = PolicyConfig.inputs
    shown_metrics: ClassVar[tuple[str, ...]] = ("reward", "flat_groups", "unparsed", "truncated")

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **companions: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # nothing is drawn
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
        # The batch's rows share the loss, so that microbatches add up to the sum over all tokens.
        share = jnp.sum(batch["share"])
        loss = Metric.mean(jnp.sum(jnp.where(drawn, batch["weights"] * losses, 0.0)) / share, share)
        return loss.value, {
            "loss": loss,
            **{name: _mean(values, drawn, count) for name, values in report.items()},
            "largest_mismatch": Metric.max(jnp.max(jnp.abs(moved))),
            "effective_share": Metric.mean(corrections.effective_share(moved, drawn), count),
            **_facts(batch),
        }

    def _of_reference(
        self, batch: Mapping[str, jax.Array], reference: LanguageModel | None
    ) -> Float[Array, "batch seq"] | None:
        """The reference's log-probabilities of the targets, where there is a reference.

        Raises:
          ConfigError: the data has those of another.
        """
        there, settings = "reference_logprobs" in batch, self.config
        if there and not (settings.kl and settings.reference == OF_DATA):
            raise ConfigError(
                f"The data has a reference (data.reference), which the objective does not read: objective.kl is "
                f"{settings.kl}, and objective.reference is {settings.reference!r}. Set objective.kl and "
                "objective.reference: data, or leave data.reference out."
            )
        if there:
            return batch["reference_logprobs"].astype(batch["old_logprobs"].dtype)
        return None if reference is None else target_figures(reference, batch).logprobs


@dataclass(frozen=True)
class ReferencedObjective(PolicyObjective):
    """The objective of a `PolicyConfig` that holds the policy to a reference."""

    @property
    def companions(self) -> Mapping[str, str]:
        return {"reference": self.config.reference}

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **companions: Any
    ) -> tuple[jax.Array, Metrics]:
        del key
        return self._loss(model, batch, companions["reference"])


@dataclass(frozen=True)
class ScoredObjective(PolicyObjective):
    """The objective of a `PolicyConfig` whose reference has scored the batch before."""

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType({**PolicyConfig.inputs, "reference_logprobs": "batch seq"})


class TargetFigures(NamedTuple):
    """Of the distribution that each target was drawn from; entropies only where they were asked for."""

    hidden: Float[Array, "batch seq embed"]
    logprobs: Float[Array, "batch seq"]
    entropies: Float[Array, "batch seq"] | None


def target_figures(model: LanguageModel, batch: Mapping[str, jax.Array], *, entropies: bool = False) -> TargetFigures:
    """What a model makes of each target, among its candidates if the batch has them.

    Logits of a whole batch are never in memory.
    """
    hidden, dtype = model(batch["tokens"], batch["positions"], batch["segment_ids"]).hidden, batch["old_logprobs"].dtype
    head, targets = model.head(), batch["targets"]
    if "candidates" in batch:
        logprobs, found = among_candidates(head, hidden, jnp.maximum(targets, 0), batch["candidates"])
    else:
        logprobs = -head.cross_entropy(hidden, targets, ignore_index=IGNORED_TARGET, reduction="none")
        found = token_entropies(head, hidden) if entropies else None
    return TargetFigures(
        hidden, logprobs.astype(dtype), found.astype(dtype) if entropies and found is not None else None
    )


def _mean(values: jax.Array, drawn: jax.Array, count: jax.Array) -> Metric:
    total = jnp.sum(jnp.where(drawn, values.astype(count.dtype), 0))
    return Metric.mean(total / jnp.maximum(count, 1), count)


def _facts(batch: Mapping[str, jax.Array]) -> Metrics:
    """Means over episodes of what else the data says of each, and how many were dropped."""
    real = batch["real"]
    count = jnp.sum(real)
    facts = {name: value for name, value in batch.items() if value.ndim == 1 and name not in PolicyConfig.inputs}
    return {
        **{name: Metric.mean(jnp.sum(value * real) / jnp.maximum(count, 1.0), count) for name, value in facts.items()},
        "dropped": Metric.sum(jnp.sum(batch["dropped"])),
    }
