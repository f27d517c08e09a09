"""Matrices of integers in the layouts of GPTQ and AWQ; `gptq` describes both.

The section `quantization_config` has one number of bits and one size of groups, so other matrices become floats, and so
does the head, which most readers do not quantize. Scales are float16, as in all readers.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stack_core.abi.errors import ConversionError
from stack_train.huggingface.codes import pack_words
from stack_train.huggingface.gptq import AWQ_ORDER
from stack_train.safetensors_files import TensorSpec

__all__ = ["UNIFORM", "AwqScheme", "GptqScheme", "UniformScheme", "common_scheme"]

_F16, _I32 = np.dtype(np.float16), np.dtype(np.int32)
_IN_LAYER = re.compile(r".*?\.\d+\.(.+)")


@dataclass(frozen=True)
class UniformScheme:
    """How all quantized matrices of a checkpoint are stored.

    Attributes:
      bits: 4 or 8 bits of a code.
      group: number of inputs that share a scale; None for one scale per output.
      symmetric: True if all zero points are the middle code.
    """

    bits: int
    group: int | None
    symmetric: bool

    def _groups(self, d_in: int) -> int:
        return 1 if self.group is None else d_in // self.group


@dataclass(frozen=True)
class GptqScheme(UniformScheme):
    """The layout of GPTQ."""

    @property
    def format(self) -> str:
        # "gptq" stores zero points minus 1, which excludes the zero point 0.
        return "gptq" if self.symmetric else "gptq_v2"

    def fits(self, name: str, shape: Sequence[int]) -> bool:
        """Returns whether a matrix [d_out, d_in] is in a layer and consists of whole words."""
        words = 32 // self.bits
        return _IN_LAYER.match(name) is not None and shape[0] % words == 0 and shape[1] % words == 0

    def specs(self, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """Returns the tensors of a matrix [d_out, d_in] in the order of `tensors`."""
        (d_out, d_in), words, module = shape, 32 // self.bits, name.removesuffix("weight")
        groups = self._groups(d_in)
        return [
            TensorSpec(f"{module}qweight", _I32, (d_in // words, d_out)),
            TensorSpec(f"{module}qzeros", _I32, (groups, d_out // words)),
            TensorSpec(f"{module}scales", _F16, (groups, d_out)),
            TensorSpec(f"{module}g_idx", _I32, (d_in,)),
        ]

    def tensors(self, codes: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None) -> Iterator[np.ndarray]:
        """Yields the values of `specs` from codes [d_out, d_in], and scales and zero points [d_out, groups].

        Raises:
          ConversionError: a scale exceeds float16.
        """
        stored, zeros = _half(scale), _zeros(scale, zero_point)
        middle = 2 ** (self.bits - 1)
        offset = middle - 1 if self.symmetric else middle
        yield np.ascontiguousarray(pack_words(codes.astype(np.int16) + middle, self.bits).T)
        yield pack_words(np.ascontiguousarray(zeros.T + offset), self.bits)
        yield stored
        yield np.arange(codes.shape[1], dtype=np.int32) // np.int32(self.group or codes.shape[1])

    def section(self, modules: Mapping[str, bool]) -> dict[str, Any]:
        """Returns the `quantization_config`.

        Args:
          modules: whether a linear layer is quantized, by the name of its module.

        Raises:
          ConversionError: a module is quantized in some layers only.
        """
        inside = [(match[1], coded) for name, coded in modules.items() if (match := _IN_LAYER.match(name))]
        coded, floats = ({name for name, is_coded in inside if is_coded is kind} for kind in (True, False))
        if both := sorted(coded & floats):
            raise ConversionError(
                f"{', '.join(both)} are quantized in some layers only, which a checkpoint of GPTQ cannot represent. "
                "Leave out --stored, which writes compressed-tensors, or quantize all layers by one rule."
            )
        section = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group or -1,
            "sym": self.symmetric,
            "desc_act": False,
            "lm_head": False,
            "checkpoint_format": self.format,
            "pack_dtype": "int32",
        }
        return section | ({"modules_in_block_to_quantize": [sorted(coded)]} if floats else {})


@dataclass(frozen=True)
class AwqScheme(UniformScheme):
    """The layout "gemm" of AWQ, in 4 bits with zero points."""

    def fits(self, name: str, shape: Sequence[int]) -> bool:
        """Returns whether a matrix [d_out, d_in] is in a layer, and its 4-bit outputs fill words of 32 bits."""
        return _IN_LAYER.match(name) is not None and self.bits == 4 and shape[0] % len(AWQ_ORDER) == 0

    def specs(self, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """Returns the tensors of a matrix [d_out, d_in] in the order of `tensors`."""
        (d_out, d_in), words, module = shape, len(AWQ_ORDER), name.removesuffix("weight")
        groups = self._groups(d_in)
        return [
            TensorSpec(f"{module}qweight", _I32, (d_in, d_out // words)),
            TensorSpec(f"{module}qzeros", _I32, (groups, d_out // words)),
            TensorSpec(f"{module}scales", _F16, (groups, d_out)),
        ]

    def tensors(self, codes: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None) -> Iterator[np.ndarray]:
        """Yields the values of `specs` from codes [d_out, d_in], and scales and zero points [d_out, groups].

        Raises:
          ConversionError: a scale exceeds float16.
        """
        stored, zeros = _half(scale), _zeros(scale, zero_point)
        yield _awq_words(codes)
        yield _awq_words(zeros)
        yield stored

    def section(self, modules: Mapping[str, bool]) -> dict[str, Any]:
        """Returns the `quantization_config`, as `GptqScheme.section` does; floats are named one by one."""
        section = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": self.group or -1}
        floats = sorted(name for name, coded in modules.items() if not coded)
        return section | {"zero_point": True, "modules_to_not_convert": floats or None}


UNIFORM: Mapping[str, type[GptqScheme] | type[AwqScheme]] = {"gptq": GptqScheme, "awq": AwqScheme}
"""Schemes that all quantized matrices of a checkpoint share, by layout."""


def common_scheme(found: Sequence[tuple[int, int | None, bool]]) -> tuple[int, int | None, bool]:
    """Returns the most common number of bits and group among (bits, group, symmetric) of matrices."""
    (bits, group), _ = Counter((bits, group) for bits, group, _ in found).most_common(1)[0]
    return bits, group, all(symmetric for *size, symmetric in found if tuple(size) == (bits, group))


def _half(scale: np.ndarray) -> np.ndarray:
    """Returns scales [d_out, groups] as float16[groups, d_out]."""
    stored = np.ascontiguousarray(scale.T.astype(_F16))
    if not np.isfinite(stored).all():
        raise ConversionError(
            f"A scale of {scale.max():.3g} exceeds float16, which GPTQ and AWQ store. Write compressed-tensors: leave "
            "out --stored."
        )
    return stored


def _zeros(scale: np.ndarray, zero_point: np.ndarray | None) -> np.ndarray:
    return np.zeros(scale.shape, np.int16) if zero_point is None else zero_point.astype(np.int16)


def _awq_words(codes: np.ndarray) -> np.ndarray:
    """Packs signed codes [d_out, n] to words [n, d_out / 8]."""
    words = (codes.astype(np.int16) + 8).T.reshape(codes.shape[1], -1, len(AWQ_ORDER))
    return pack_words(words[..., AWQ_ORDER].reshape(codes.shape[1], -1), 4)
