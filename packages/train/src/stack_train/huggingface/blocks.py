"""Dequantization of published checkpoints with a scale per block: FP8 (DeepSeek-V3) and MXFP4 (experts of gpt-oss)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from stack_core.abi.errors import ConversionError
from stack_train.safetensors_files import StoredTensor

__all__ = ["QUANTIZATION", "BlockTensor", "MicroscaledTensor", "with_blocks"]

QUANTIZATION = "quantization_config"
"""The key of `config.json` with the quantization of a checkpoint's weights."""

_CODES, _SCALE = "F8_E4M3", "_scale_inv"
_FP4_CODES, _FP4_SCALES = "_blocks", "_scales"
_FP4_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The highest bit of a code is the sign.
_FP4_VALUES = np.concatenate([_FP4_VALUES, -_FP4_VALUES]).astype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class BlockTensor(StoredTensor):
    """A matrix in FP8 (E4M3) with one scale per block, dequantized to bfloat16 on reading.

        w[i, j] = code[i, j] * scale[i // rows, j // columns]

    Attributes:
      scales: the scales, float32[ceil(d_out / rows), ceil(d_in / columns)].
      block: size of a block, (rows, columns).

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv:2412.19437), section 3.3.
    """

    scales: StoredTensor
    block: tuple[int, int]

    def read(self) -> np.ndarray:
        # In float32, since FP8 cannot represent the products with the scales.
        codes = _bytes_of(self).view(ml_dtypes.float8_e4m3fn).reshape(self.shape).astype(np.float32)
        scales = self.scales.read()
        # The last block of an axis may be partial, hence the `take`.
        for axis, size in enumerate(self.block):
            scales = np.repeat(scales, size, axis).take(range(self.shape[axis]), axis)
        return (codes * scales).astype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class MicroscaledTensor(StoredTensor):
    """Matrices of experts in MXFP4, dequantized on reading; bfloat16 represents the values exactly.

        w[expert, i, j] = value(code[expert, j, i]) * 2**(scale[expert, j, i // 32] - 127)

    A code is a 4-bit float (E2M1). A byte holds two codes, the first in its low bits.

    Attributes:
      codes: pairs of codes, uint8[experts, d_out, d_in / 32, 16].
      scales: biased exponents, uint8[experts, d_out, d_in / 32].

    Source: OCP Microscaling Formats (MX) Specification 1.0, 2023, section 5.3.
    """

    codes: StoredTensor
    scales: StoredTensor

    def read(self) -> np.ndarray:
        codes, scales = self.codes.read(), self.scales.read()
        values = np.empty(self.shape, ml_dtypes.bfloat16)
        # One expert at a time, because the float32 intermediates are larger than the result.
        for expert, (codes_of, scales_of) in enumerate(zip(codes, scales, strict=True)):
            numbers = np.stack([codes_of & 0xF, codes_of >> 4], axis=-1)  # [d_out, blocks, 16, 2]
            # `ldexp` computes powers of 2 exactly.
            factors = np.ldexp(np.float32(1), scales_of.astype(np.int32) - 127)[..., None]
            of_blocks = _FP4_VALUES[numbers].astype(np.float32).reshape(*scales_of.shape, 32) * factors
            values[expert] = of_blocks.reshape(len(scales_of), -1).T
        return values


def with_blocks(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor]]:
    """Presents a quantized checkpoint as a bfloat16 checkpoint; returns any other one unchanged.

    Args:
      config: content of `config.json`.
      tensors: tensors of the checkpoint by name.

    Returns:
      The config without the quantization, and the tensors, which are dequantized when they are read.

    Raises:
      ConversionError: the quantization is not supported, or scales are missing or have the wrong shape; names each.
    """
    coding = config.get(QUANTIZATION)
    if coding is None:
        return config, tensors
    if coding.get("quant_method") == "mxfp4":
        return {key: value for key, value in config.items() if key != QUANTIZATION}, _microscaled(tensors)
    block = coding.get("weight_block_size")
    if coding.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        raise ConversionError(
            f"The checkpoint is quantized by {coding.get('quant_method')!r}, weight_block_size={block!r}. Read are "
            "weights in float, in FP8 by blocks (quant_method 'fp8', weight_block_size [rows, columns]), and in MXFP4 "
            "(quant_method 'mxfp4')."
        )
    size = (int(block[0]), int(block[1]))
    found, problems = dict[str, StoredTensor](), list[str]()
    for name, tensor in tensors.items():
        # Scales are read together with their codes.
        if name.endswith(_SCALE) and _is_coded(tensors.get(name.removesuffix(_SCALE))):
            continue
        found[name] = tensor
        if not _is_coded(tensor):
            continue
        expected = tuple(-(-length // entries) for length, entries in zip(tensor.shape, size, strict=True))
        scales = tensors.get(name + _SCALE)
        if scales is None or (scales.shape, scales.dtype) != (expected, "F32"):
            there = "is missing" if scales is None else f"is {scales.dtype}{list(scales.shape)}"
            problems.append(f"{name}{_SCALE} {there}; expected F32{list(expected)}")
        else:
            found[name] = BlockTensor(tensor.path, name, "BF16", tensor.shape, scales, size)
    if problems:
        raise ConversionError("The scales of FP8 weights do not fit:\n  " + "\n  ".join(sorted(problems)))
    return {key: value for key, value in config.items() if key != QUANTIZATION}, found


def _microscaled(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    found, problems = dict[str, StoredTensor](), list[str]()
    for name, tensor in tensors.items():
        plain = name.removesuffix(_FP4_SCALES)
        if name != plain and plain + _FP4_CODES in tensors:
            continue
        plain = name.removesuffix(_FP4_CODES)
        if name == plain:
            found[name] = tensor
            continue
        scales, shape = tensors.get(plain + _FP4_SCALES), tensor.shape
        if len(shape) != 4 or shape[-1] != 16 or tensor.dtype != "U8":
            problems.append(f"{name} is {tensor.dtype}{list(shape)}; expected U8[experts, d_out, d_in / 32, 16]")
        elif scales is None or (scales.shape, scales.dtype) != (shape[:-1], "U8"):
            there = "is missing" if scales is None else f"is {scales.dtype}{list(scales.shape)}"
            problems.append(f"{plain}{_FP4_SCALES} {there}; expected U8{list(shape[:-1])}")
        else:
            whole = (shape[0], shape[2] * 32, shape[1])
            found[plain] = MicroscaledTensor(tensor.path, plain, "BF16", whole, tensor, scales)
    if problems:
        raise ConversionError("The blocks of MXFP4 weights do not fit:\n  " + "\n  ".join(sorted(problems)))
    return found


def _is_coded(tensor: StoredTensor | None) -> bool:
    return tensor is not None and tensor.dtype == _CODES and len(tensor.shape) == 2


def _bytes_of(tensor: StoredTensor) -> np.ndarray:
    """Reads the bytes of a tensor whose dtype the safetensors library cannot convert to NumPy."""
    with tensor.path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(header_bytes))[tensor.name]["data_offsets"]
        file.seek(8 + header_bytes + start)
        content = file.read(end - start)
    if len(content) != end - start:
        raise ConversionError(f"{tensor.path} is no whole safetensors file: {tensor.name} is cut. Download it again.")
    return np.frombuffer(content, np.uint8)
