"""Matrices of integers in the layout of GPTQ; `gptq` describes it.

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
from stack_train.safetensors_files import TensorSpec

__all__ = ["GptqScheme", "common_scheme", "gptq_section"]

_F16, _I32 = np.dtype(np.float16), np.dtype(np.int32)
_IN_LAYER = re.compile(r".*?\.\d+\.(.+)")


@dataclass(frozen=True)
class GptqScheme:
    """How all quantized matrices of a checkpoint are stored.

    Attributes:
      bits: 4 or 8 bits of a code.
      group: number of inputs that share a scale; None for one scale per output.
      symmetric: True if all zero points are the middle code.
    """

    bits: int
    group: int | None
    symmetric: bool

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
        groups = 1 if self.group is None else d_in // self.group
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
        stored = scale.T.astype(_F16)
        if not np.isfinite(stored).all():
            raise ConversionError(
                f"A scale of {scale.max():.3g} exceeds float16, which GPTQ stores. Write compressed-tensors: leave out "
                "--stored."
            )
        middle = 2 ** (self.bits - 1)
        zeros = np.zeros(scale.shape, np.int16) if zero_point is None else zero_point.astype(np.int16)
        offset = middle - 1 if self.symmetric else middle
        yield np.ascontiguousarray(pack_words(codes.astype(np.int16) + middle, self.bits).T)
        yield pack_words(np.ascontiguousarray(zeros.T + offset), self.bits)
        yield np.ascontiguousarray(stored)
        yield np.arange(codes.shape[1], dtype=np.int32) // np.int32(self.group or codes.shape[1])


def common_scheme(found: Sequence[tuple[int, int | None, bool]]) -> GptqScheme:
    """Returns the scheme for the most common number of bits and group among (bits, group, symmetric) of matrices."""
    (bits, group), _ = Counter((bits, group) for bits, group, _ in found).most_common(1)[0]
    return GptqScheme(bits, group, all(symmetric for *size, symmetric in found if tuple(size) == (bits, group)))


def gptq_section(scheme: GptqScheme, modules: Mapping[str, bool]) -> dict[str, Any]:
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
            f"{', '.join(both)} are quantized in some layers only, which a checkpoint of GPTQ cannot represent. Leave "
            "out --stored, which writes compressed-tensors, or quantize all layers by one rule."
        )
    section = {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group or -1,
        "sym": scheme.symmetric,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": scheme.format,
        "pack_dtype": "int32",
    }
    return section | ({"modules_in_block_to_quantize": [sorted(coded)]} if floats else {})
