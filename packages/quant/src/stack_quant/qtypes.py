"""Quantized types: integers, small floats and codebooks."""

from dataclasses import dataclass
from typing import Final

from stack_core.abi.errors import UnknownName, nearest

__all__ = ["QTYPES", "QType", "qtype"]


@dataclass(frozen=True)
class QType:
    """A quantized type.

    Attributes:
      name: name of the type in rules and specs.
      bits: size of a stored code.
      code_dtype: JAX dtype of the unpacked codes.
      smallest, largest: smallest and largest value of a code.
      codebook: increasing values that the codes index; None for types whose codes are the values.
      block_size: number of entries that share a scale, for types that prescribe a number; else None.
      scale_dtype: dtype of the stored scales. float8_e4m3fn scales are multiples of a float32 unit.
    """

    name: str
    bits: int
    code_dtype: str
    smallest: float
    largest: float
    codebook: tuple[float, ...] | None = None
    block_size: int | None = None
    scale_dtype: str = "float32"

    @property
    def is_integer(self) -> bool:
        """True if codes are evenly spaced integers, which a zero point requires."""
        return self.name.startswith("int")


def _integer(bits: int) -> QType:
    largest = 2.0 ** (bits - 1) - 1
    # JAX has integers of 2, 4 and 8 bits; other widths use the next larger one.
    dtype = {2: "int2", 3: "int4", 4: "int4"}.get(bits, "int8")
    return QType(f"int{bits}", bits, dtype, -largest - 1, largest)


def _floating(
    name: str, code_dtype: str, largest: float, *, block_size: int | None = None, scale_dtype: str = "float32"
) -> QType:
    bits = 4 if code_dtype == "float4_e2m1fn" else 8
    return QType(name, bits, code_dtype, -largest, largest, None, block_size, scale_dtype)


# Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023 (arXiv:2305.14314), appendix E.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# The mx types follow the OCP Microscaling Formats (MX) Specification 1.0, 2023.
_ALL = (
    *(_integer(bits) for bits in range(2, 9)),
    _floating("fp8_e4m3", "float8_e4m3fn", 448.0),
    _floating("fp8_e5m2", "float8_e5m2", 57344.0),
    _floating("fp4", "float4_e2m1fn", 6.0),
    QType("nf4", 4, "uint4", -1.0, 1.0, _NF4),
    _floating("mxfp8", "float8_e4m3fn", 448.0, block_size=32, scale_dtype="float8_e8m0fnu"),
    _floating("mxfp4", "float4_e2m1fn", 6.0, block_size=32, scale_dtype="float8_e8m0fnu"),
    _floating("nvfp4", "float4_e2m1fn", 6.0, block_size=16, scale_dtype="float8_e4m3fn"),
)

QTYPES: Final = {one.name: one for one in _ALL}
"""All types by name."""


def qtype(name: str) -> QType:
    """Looks up a type by name.

    Raises:
      UnknownName: the type does not exist; the message suggests the nearest name and lists all names.
    """
    if name not in QTYPES:
        raise UnknownName(f"Unknown type {name!r}.{nearest(name, QTYPES)} Types: {', '.join(QTYPES)}.")
    return QTYPES[name]
