"""Losses of a student beside a teacher that shares its vocabulary, from the logits of both."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["forward_kl", "generalized_jsd", "reverse_kl"]

Logits = Float[Array, "*tokens vocab"]


def forward_kl(logits: Logits, teacher_logits: Logits, *, temperature: float = 1.0) -> Float[Array, "*tokens"]:
    """L = T^2 sum_v p_v (log p_v - log q_v), with the teacher's p and the student's q at temperature T.

    T^2 keeps the size of gradients the same at all temperatures.

    Source: Hinton et al., Distilling the knowledge in a neural network, 2015 (arXiv:1503.02531), section 2.
    """
    student, teacher = _log_softmax(logits, temperature), _log_softmax(teacher_logits, temperature)
    return temperature**2 * _kl(teacher, student)


def reverse_kl(logits: Logits, teacher_logits: Logits, *, temperature: float = 1.0) -> Float[Array, "*tokens"]:
    """L = T^2 sum_v q_v (log q_v - log p_v): the student goes where the teacher is sure rather than everywhere.

    Source: Gu et al., MiniLLM, 2023 (arXiv:2306.08543), equation 1, a token at a time.
    """
    student, teacher = _log_softmax(logits, temperature), _log_softmax(teacher_logits, temperature)
    return temperature**2 * _kl(student, teacher)


def generalized_jsd(
    logits: Logits, teacher_logits: Logits, *, beta: float = 0.5, temperature: float = 1.0
) -> Float[Array, "*tokens"]:
    """L = beta KL(p || m) + (1 - beta) KL(q || m), with m = beta p + (1 - beta) q.

    Args:
      beta: in (0, 1); over beta it tends to `forward_kl` as beta goes to 0, over 1 - beta to `reverse_kl` at 1.

    Source: Agarwal et al., On-policy distillation of language models (GKD), 2023 (arXiv:2306.13649), equation 1.
    Departures: (1) TRL takes 0 and 1 to be the two KL divergences themselves, which the formula's limits, 0, are not.
    """
    student, teacher = _log_softmax(logits, temperature), _log_softmax(teacher_logits, temperature)
    mixed = jnp.logaddexp(teacher + jnp.log(beta), student + jnp.log1p(-beta))
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)


def _log_softmax(logits: jax.Array, temperature: float) -> jax.Array:
    return jax.nn.log_softmax(logits / temperature, axis=-1)


def _kl(logprobs: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(logprobs) * (logprobs - other), axis=-1)
