"""A dense feed-forward layer and a mixture of experts side by side, with separate norms."""

import math
from dataclasses import dataclass

from stack_train.nn.build import Build
from stack_train.nn.experts import Experts, Mixture
from stack_train.nn.feed_forward import Facts, Gated
from stack_train.nn.residual import STREAM, Hidden, Rows, gather_sequence, shard_residual

__all__ = ["ParallelExperts"]


@dataclass(frozen=True, kw_only=True)
class ParallelExperts(Experts):
    """y = norm(dense(norm(x))) + norm(experts(norm(x))), with four norms of different scales, as in Gemma 4.

    The router reads s rms(x) / sqrt(embed) for a learned scale s[embed]. The layer normalizes its own input, so it
    belongs to a `Layer` with `feed_forward_norm=False`.

    Attributes:
      dense: hidden width of the dense layer, with the activation of the experts.
    """

    dense: int

    def build(self, build: Build) -> "ParallelMixture":
        return ParallelMixture(self, build)


class ParallelMixture(Mixture):
    """Module of a `ParallelExperts`."""

    def __init__(self, spec: ParallelExperts, build: Build) -> None:
        super().__init__(spec, build)
        self.norm, self.router_factor = build.norm, 1 / math.sqrt(build.embed)
        self.dense_norm, self.dense_output_norm = build.scale(build.embed), build.scale(build.embed)
        self.expert_norm, self.expert_output_norm = build.scale(build.embed), build.scale(build.embed)
        self.router_scale = build.scale(build.embed)
        self.dense = Gated(width=spec.dense, activation=spec.activation).build(build.child())

    def __call__(self, x: Hidden, rows: Rows) -> tuple[Hidden, Facts]:
        dense, _ = self.dense(gather_sequence(self.norm(x, self.dense_norm, STREAM)), rows)
        routed = gather_sequence(self.norm(x, self.router_scale, STREAM) * self.router_factor)
        inputs = gather_sequence(self.norm(x, self.expert_norm, STREAM))
        experts, facts = self.mixed(inputs, rows, routed)
        normed = self.norm(shard_residual(experts), self.expert_output_norm, STREAM)
        return self.norm(shard_residual(dense), self.dense_output_norm, STREAM) + normed, facts
