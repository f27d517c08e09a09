"""Distillation losses between the logits of a student and of a teacher with the same vocabulary."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["forward_kl", "generalized_jsd", "reverse_kl"]

Logits = Float[Array, "*tokens vocab"]


def forward_kl(logits: Logits, teacher_logits: Logits, *, temperature: float = 1.0) -> Float[Array, "*tokens"]:
    """Computes L = T^2 sum_v p_v (log p_v - log q_v), with the teacher's p and the student's q at temperature T.

    The factor T^2 keeps the scale of the gradient independent of T.

    Source: Hinton et al., Distilling the knowledge in a neural network, 2015 (arXiv:1503.02531), section 2.
    """
    student, teacher = _log_softmax(logits, temperature), _log_softmax(teacher_logits, temperature)
    return temperature**2 * _kl(teacher, student)


def reverse_kl(logits: Logits, teacher_logits: Logits, *, temperature: float = 1.0) -> Float[Array, "*tokens"]:
    """Computes L = T^2 sum_v q_v (log q_v - log p_v), which is mode-seeking: the student may cover few teacher modes.

    Source: Gu et al., MiniLLM, 2023 (arXiv:2306.08543), equation 1, a token at a time.
    """
    student, teacher = _log_softmax(logits, temperature), _log_softmax(teacher_logits, temperature)
    return temperature**2 * _kl(student, teacher)


def generalized_jsd(
    logits: Logits, teacher_logits: Logits, *, beta: float = 0.5, temperature: float = 1.0
) -> Float[Array, "*tokens"]:
    """Computes L = beta KL(p || m) + (1 - beta) KL(q || m), with m = beta p + (1 - beta) q.

    Args:
      logits: logits of the student.
      teacher_logits: logits of the teacher.
      beta: weight in (0, 1). L / beta tends to `forward_kl` as beta goes to 0, and L / (1 - beta) to `reverse_kl` as
        beta goes to 1.
      temperature: temperature of both distributions.

    Source: Agarwal et al., On-policy distillation of language models (GKD), 2023 (arXiv:2306.13649), equation 1.
    Departures: (1) for beta 0 and 1, TRL returns the two KL divergences, although the formula's limit is 0.
    """
    student, teacher = _log_softmax(logits, temperature), _log_softmax(teacher_logits, temperature)
    mixed = jnp.logaddexp(teacher + jnp.log(beta), student + jnp.log1p(-beta))
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)


def _log_softmax(logits: jax.Array, temperature: float) -> jax.Array:
    return jax.nn.log_softmax(logits / temperature, axis=-1)


def _kl(logprobs: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(logprobs) * (logprobs - other), axis=-1)
