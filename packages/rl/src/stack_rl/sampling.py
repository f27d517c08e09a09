"""Sampling settings of the policy."""

from dataclasses import dataclass
from typing import Final

__all__ = ["AS_MODEL", "PolicySampling"]


@dataclass(frozen=True)
class PolicySampling:
    """Sampling settings of the policy, named and defined as in `SamplingParams`; the defaults sample from the model."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def is_narrowed(self) -> bool:
        """Whether tokens may be excluded from sampling; trajectories then store the candidates."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence penalty."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def is_penalized(self) -> bool:
        """True if the logits depend on earlier tokens."""
        return self.penalties != (1.0, 0.0, 0.0)


AS_MODEL: Final = PolicySampling()
"""Settings that sample from the model's own distribution."""
