"""Top-n-sigma sampling: only tokens within n standard deviations of the most likely one remain candidates."""

from typing import Annotated

import jax.numpy as jnp
from pydantic import Field

from stack_core.abi.config import config
from stack_core.ops.sampling.processors import LogitsProcessor


@config
class TopSigma:
    """Parameters of a request.

    Attributes:
      n: number of standard deviations below the largest logit.
    """

    n: Annotated[float, Field(gt=0.0)] = 1.0


def top_sigma(logits, params, history):
    """Returns z_i if z_i >= max(z) - n std(z), otherwise -inf. Source: Tang et al., 2024 (arXiv:2411.07641)."""
    deviation = jnp.std(logits, where=jnp.isfinite(logits))  # without tokens that a constraint excludes
    return jnp.where(logits >= jnp.max(logits) - params.n * deviation, logits, -jnp.inf)


TOP_SIGMA = LogitsProcessor(TopSigma, top_sigma)
