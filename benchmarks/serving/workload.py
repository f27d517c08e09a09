"""The model and the requests that every engine gets. It needs the standard library alone: every environment has it."""

import random
from dataclasses import asdict, dataclass

__all__ = ["WORKLOADS", "Workload", "prompts"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A Llama with untied embeddings and random weights, and how long its prompts and continuations are.

    The defaults have 56.4 million parameters.
    """

    layers: int = 8
    embed: int = 512
    heads: int = 8
    kv_heads: int = 4
    mlp: int = 1408
    vocab: int = 32_000
    max_positions: int = 1024
    prompt_tokens: int = 128
    new_tokens: int = 128

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def layer_parameters(self) -> int:
        """Of all layers' matrices; the head has `embed * vocab` more, and of the embedding one row a token is read."""
        attention = 2 * self.embed * self.embed + 2 * self.embed * self.kv_heads * self.head_dim
        return self.layers * (attention + 3 * self.embed * self.mlp)

    @property
    def token_flops(self) -> int:
        """Of one decoded token in matrix products, attention left out."""
        return 2 * (self.layer_parameters + self.embed * self.vocab)

    def title(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


WORKLOADS = {
    "random": Workload(),
    "smollm2": Workload(layers=30, embed=576, heads=9, kv_heads=3, mlp=1536, vocab=49_152, max_positions=8192),
}
"""Random weights, and the published weights of SmolLM2-135M-Instruct, whose embedding is its head as well."""


def prompts(workload: Workload, *, batch: int, seed: int) -> list[list[int]]:
    """Random tokens, other ones for each seed, so that no engine finds a prompt among those that it kept."""
    source = random.Random(f"{seed} {batch}")
    return [[source.randrange(10, workload.vocab) for _ in range(workload.prompt_tokens)] for _ in range(batch)]
