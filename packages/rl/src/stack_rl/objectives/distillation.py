"""Distillation on given text: matches the student's distribution at each token to the teacher's."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field, PositiveFloat

from stack_core.abi.config import LocalAddress, config
from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ConfigError
from stack_core.abi.metrics import Metric, Metrics
from stack_core.abi.models import LanguageModel
from stack_core.abi.objectives import Objective
from stack_core.ops import Head
from stack_rl.math.distillation import forward_kl, generalized_jsd, reverse_kl
from stack_rl.objectives.parts import MAX_LOGITS, by_parts

__all__ = ["LogitDistillConfig", "token_divergences"]

Divergence = Callable[[Float[Array, "*tokens vocab"], Float[Array, "*tokens vocab"]], Float[Array, "*tokens"]]


@config
class LogitDistillConfig(Objective):
    """Distillation by logits: matches the student's full distribution to the teacher's at every target.

        l = T^2 KL(p_teacher || p) ("forward"), T^2 KL(p || p_teacher) ("reverse"), or
        l = beta KL(p_teacher || m) + (1 - beta) KL(p || m), m = beta p_teacher + (1 - beta) p ("jsd")

    Both distributions are at temperature T. It works on any data with targets, such as `data.name: chat` or `text`; the
    objective `distill` distills on samples of the student.

    Attributes:
      teacher: "run:DIRECTORY", a model with the student's vocabulary.
      name: selects this objective.
      divergence: "forward" KL, "reverse" KL or the generalized Jensen-Shannon divergence "jsd".
      temperature: T.
      beta: weight of the teacher in "jsd".

    Source: Hinton et al., Distilling the knowledge in a neural network, 2015 (arXiv:1503.02531), section 2; "jsd":
    Agarwal et al., On-policy distillation of language models (GKD), 2023 (arXiv:2306.13649), equation 1.
    """

    teacher: LocalAddress
    name: Literal["logit_distill"] = "logit_distill"
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    temperature: PositiveFloat = 1.0
    beta: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5

    inputs: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), "batch seq")
    )

    def __post_init__(self) -> None:
        if not self.teacher.startswith("run:"):
            raise ConfigError(f"objective.teacher is {self.teacher!r}; name the teacher's run: run:DIRECTORY.")

    @property
    def auxiliary_models(self) -> Mapping[str, str]:
        return {"teacher": self.teacher}

    def __call__(
        self, model: LanguageModel, batch: Mapping[str, jax.Array], *, key: jax.Array, **auxiliary: Any
    ) -> tuple[jax.Array, Metrics]:
        del key  # the loss is not random
        inputs = batch["tokens"], batch["positions"], batch["segment_ids"]
        teacher: LanguageModel = auxiliary["teacher"]
        hidden, of_teacher = model(*inputs).hidden, teacher(*inputs).hidden
        losses = token_divergences(model.head(), hidden, teacher.head(), of_teacher, self._divergence)
        real = batch["targets"] != IGNORED_TARGET
        count = jnp.sum(real.astype(losses.dtype))
        loss = Metric.mean(jnp.sum(jnp.where(real, losses, 0)) / jnp.maximum(count, 1), count)
        return loss.value, {"loss": loss}

    @property
    def _divergence(self) -> Divergence:
        if self.divergence == "jsd":
            return partial(generalized_jsd, beta=self.beta, temperature=self.temperature)
        return partial(forward_kl if self.divergence == "forward" else reverse_kl, temperature=self.temperature)


def token_divergences(
    head: Head,
    hidden: Float[Array, "batch seq embed"],
    teacher_head: Head,
    teacher_hidden: Float[Array, "batch seq teacher_embed"],
    divergence: Divergence,
    *,
    max_logits: int = MAX_LOGITS,
) -> Float[Array, "batch seq"]:
    """Computes the divergence at every token, chunk by chunk. The teacher gets no gradient."""

    def of_part(head: Head, student: jax.Array, teacher: jax.Array) -> jax.Array:
        return divergence(head.logits(student), jax.lax.stop_gradient(teacher_head.logits(teacher)))

    return by_parts(of_part, head, hidden, teacher_hidden, max_logits=max_logits)
