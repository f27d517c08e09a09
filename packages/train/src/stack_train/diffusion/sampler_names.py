"""Names of samplers and of spacings of their steps, without the imports of the samplers."""

from typing import Literal, TypeAlias

__all__ = ["SamplerName", "Spacing"]

SamplerName: TypeAlias = Literal[
    "euler",
    "euler_ancestral",
    "ddim",
    "heun",
    "plms",
    "dpmpp_2m",
    "dpmpp_3m",
    "dpmpp_2m_sde",
    "dpmpp_3m_sde",
    "unipc",
    "lcm",
]
Spacing: TypeAlias = Literal["leading", "trailing", "linspace"]
