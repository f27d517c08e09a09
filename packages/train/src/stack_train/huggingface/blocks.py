"""Dequantization of published checkpoints with a scale per block: FP8 (DeepSeek-V3) and MXFP4 (experts of gpt-oss).

DeepSeek-V4 uses both, with power-of-2 scales.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from stack_core.abi.errors import ConversionError
from stack_train.huggingface.codes import Coding, check_read, fp4_values, is_positive, problem_of
from stack_train.models.reader import Reader
from stack_train.safetensors_files import StoredTensor

__all__ = ["BlockTensor", "MicroscaledTensor", "PackedTensor", "fp8_codes", "read_fp8", "read_mxfp4"]

_CODES, _PACKED_CODES, _POWERS = "F8_E4M3", "I8", "F8_E8M0"
_WEIGHT, _SCALE, _ACTIVATION_SCALE = ".weight", "_scale_inv", ".activation_scale"
_POWER_SCALE = ".scale"
_MICROSCALED = 32
_FP4_CODES, _FP4_SCALES = "_blocks", "_scales"
_FLOATS = ("F32", "BF16")


@dataclass(frozen=True)
class BlockTensor(StoredTensor):
    """A matrix in FP8 (E4M3) with one scale per block, dequantized to the tensor's `dtype` on reading.

        w[i, j] = code[i, j] * scale[i // rows, j // columns]

    Attributes:
      scales: the scales, [ceil(d_out / rows), ceil(d_in / columns)].
      block: size of a block, (rows, columns).

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv:2412.19437), section 3.3.
    """

    scales: StoredTensor
    block: tuple[int, int]

    def read(self) -> np.ndarray:
        # In float32, since FP8 cannot represent the products with the scales.
        codes = fp8_codes(self).astype(np.float32)
        scales = np.atleast_2d(_scales_of(self.scales))
        # The last block of an axis may be partial, hence the `take`.
        for axis, size in enumerate(self.block):
            scales = np.repeat(scales, size, axis).take(range(self.shape[axis]), axis)
        return (codes * scales).astype(self.numpy_dtype)


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
            # `ldexp` computes powers of 2 exactly.
            factors = np.ldexp(np.float32(1), scales_of.astype(np.int32) - 127)[..., None]
            of_blocks = fp4_values(codes_of).astype(np.float32) * factors  # [d_out, blocks, 32]
            values[expert] = of_blocks.reshape(len(scales_of), -1).T
        return values


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A matrix in MXFP4 with the layout of torch, dequantized on reading; bfloat16 represents the values exactly.

        w[i, j] = value(code[i, j]) * 2**(scale[i, j // 32] - 127)

    Attributes:
      codes: pairs of codes as in `MicroscaledTensor`, int8[d_out, d_in / 2].
      scales: powers of 2, [d_out, d_in / 32].
    """

    codes: StoredTensor
    scales: StoredTensor

    def read(self) -> np.ndarray:
        values = fp4_values(self.codes.read().view(np.uint8)).astype(np.float32)
        return (values * np.repeat(_scales_of(self.scales), _MICROSCALED, axis=1)).astype(self.numpy_dtype)


def fp8_codes(tensor: StoredTensor) -> np.ndarray:
    """Reads a tensor of float8_e4m3fn."""
    return _bytes_of(tensor).view(ml_dtypes.float8_e4m3fn).reshape(tensor.shape)


def read_fp8(coding: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Coding:
    """Presents the FP8 and packed MXFP4 matrices of a checkpoint as bfloat16 tensors.

    The scales of FP8 are `weight_scale_inv`: one per block of `weight_block_size`, or one per matrix if it is null.
    In DeepSeek-V4, the power-of-2 scales of both are named `scale`.

    Args:
      coding: the `quantization_config`.
      tensors: tensors of the checkpoint by name.

    Raises:
      ConversionError: a setting is not supported, or scales are missing or have the wrong shape; names each.
    """
    reader = Reader(coding)
    # Scales have been rounded already, and tensors show which modules are in float.
    reader.get("quant_method", "scale_fmt", "expert_dtype", "modules_to_not_convert", "ignored_layers")
    inputs = reader.get("activation_scheme")
    if inputs not in (None, "dynamic", "static"):
        reader.problems.append(f"activation_scheme={inputs!r}, not 'dynamic' or 'static'")
    reader.expect("fmt", "e4m3")
    block = reader.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(map(is_positive, block))):
        reader.problems.append(f"weight_block_size={block!r}, not [rows, columns] or null")
    check_read(reader, "quantization_config")
    tensors, problems = _packed(tensors)
    found = dict[str, StoredTensor]()
    for name, tensor in tensors.items():
        # Scales are read together with their codes.
        if _is_coded(tensors.get(_codes_of(name))):
            continue
        if name.endswith(_ACTIVATION_SCALE):
            inputs = inputs or "static"
            continue
        found[name] = tensor
        if not _is_coded(tensor):
            continue
        size = (int(block[0]), int(block[1])) if block else (tensor.shape[0], tensor.shape[1])
        expected = (
            tuple(-(-length // entries) for length, entries in zip(tensor.shape, size, strict=True)) if block else ()
        )
        scales = tensors.get(name + _SCALE, tensors.get(name.removesuffix(_WEIGHT) + _POWER_SCALE))
        if scales is None or scales.shape != expected or scales.dtype not in (*_FLOATS, _POWERS):
            there = "is missing" if scales is None else f"is {scales.dtype}{list(scales.shape)}"
            problems.append(f"{name}{_SCALE} {there}; expected F32{list(expected)}")
        else:
            found[name] = BlockTensor(tensor.path, name, "BF16", tensor.shape, scales, size)
    if problems:
        raise ConversionError("The scales of FP8 weights do not fit:\n  " + "\n  ".join(sorted(problems)))
    return Coding(found, () if inputs is None else (f"fp8 inputs of products (activation_scheme={inputs!r})",))


def read_mxfp4(coding: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Coding:
    """Presents the MXFP4 experts of a checkpoint as bfloat16 tensors; arguments and errors of `read_fp8`."""
    reader = Reader(coding)
    reader.get("quant_method", "modules_to_not_convert", "dequantize")
    check_read(reader, "quantization_config")
    return Coding(_microscaled(tensors))


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


def _packed(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Presents MXFP4 matrices in bytes with scales as bfloat16 tensors; returns all tensors and problems."""
    found, problems = dict(tensors), list[str]()
    for name, tensor in tensors.items():
        powers = tensors.get(name.removesuffix(_WEIGHT) + _POWER_SCALE)
        if powers is None or tensor.dtype != _PACKED_CODES or len(tensor.shape) != 2:
            continue
        shape = (tensor.shape[0], 2 * tensor.shape[1])
        if problem := problem_of(powers.name, powers, (_POWERS,), (shape[0], shape[1] // _MICROSCALED)):
            problems.append(problem)
        found[name] = PackedTensor(tensor.path, name, "BF16", shape, tensor, powers)
        del found[powers.name]
    return found, problems


def _codes_of(name: str) -> str:
    """Returns the name of the FP8 codes that a tensor would scale; an empty name unless it is named like scales."""
    if name.endswith(_SCALE):
        return name.removesuffix(_SCALE)
    return name.removesuffix(_POWER_SCALE) + _WEIGHT if name.endswith(_POWER_SCALE) else ""


def _scales_of(tensor: StoredTensor) -> np.ndarray:
    """Reads scales in float32. E8M0 stores biased exponents."""
    if tensor.dtype != _POWERS:
        return tensor.read().astype(np.float32)
    # `ldexp` computes powers of 2 exactly.
    return np.ldexp(np.float32(1), _bytes_of(tensor).astype(np.int32) - 127).reshape(tensor.shape)


def _bytes_of(tensor: StoredTensor) -> np.ndarray:
    """Reads the bytes of a tensor whose dtype the safetensors library cannot convert to NumPy."""
    with tensor.path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(header_bytes))[tensor.name]["data_offsets"]
        file.seek(8 + header_bytes + start)
        content = file.read(end - start)
    if len(content) != end - start:
        raise ConversionError(
            f"{tensor.path} is not a complete safetensors file: {tensor.name} is cut. Download it again."
        )
    return np.frombuffer(content, np.uint8)
