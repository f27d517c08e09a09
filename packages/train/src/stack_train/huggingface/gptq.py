"""Checkpoints in the layouts of GPTQ and AWQ, in integers with zero points.

Both store matrices as [d_in, d_out], the transpose of torch's layout, with scales and zero points for groups of inputs.

GPTQ (AutoGPTQ, GPTQModel): `qweight` is int32, packed along the inputs; `qzeros` is int32, packed along the
outputs; `scales` is [groups, d_out]; `g_idx` is the group of each input. The checkpoint format "gptq" stores zero
points minus 1, "gptq_v2" stores them unchanged.

    w[j, i] = (code[j, i] - zero[g_idx[j], i]) * scale[g_idx[j], i]

AWQ (AutoAWQ, version "gemm"): `qweight` and `qzeros` are int32, packed along the outputs, where the bits of a word from
the lowest up hold its outputs 0, 2, 4, 6, 1, 3, 5, 7. Groups are adjacent inputs.

Sources: https://github.com/ModelCloud/GPTQModel, `nn_modules/qlinear`; https://github.com/casper-hansen/AutoAWQ,
`modules/linear/gemm.py`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from stack_core.abi.errors import ConversionError
from stack_train.huggingface.codes import (
    Codes,
    Coding,
    Form,
    QuantizedTensor,
    check_read,
    is_positive,
    problem_of,
    unpack_words,
)
from stack_train.models.reader import Reader
from stack_train.safetensors_files import StoredTensor

__all__ = ["AWQ_ORDER", "read_awq", "read_gptq"]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each 4-bit place of a word of AWQ, from the lowest bits up."""

_PLACE = "quantization_config"
_FLOATS = ("F16", "BF16", "F32")
# Settings of the quantization and of kernels, which do not affect the decoding of stored codes.
_GPTQ_SILENT = [
    "quant_method",
    "sym",
    "desc_act",
    "static_groups",
    "true_sequential",
    "damp_percent",
    "damp_auto_increment",
    "dataset",
    "tokenizer",
    "model_name_or_path",
    "model_file_base_name",
    "model_seqlen",
    "batch_size",
    "pad_token_id",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_not_convert",
    "cache_block_outputs",
    "max_input_length",
    "use_cuda_fp16",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "backend",
    "quantizer",
    "meta",
    "lm_head",
    "mse",
    "act_group_aware",
    "true_act_order",
]
_AWQ_SILENT = [
    "quant_method",
    "modules_to_not_convert",
    "backend",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "modules_to_fuse",
]


def read_gptq(coding: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Coding:
    """Presents the matrices of a GPTQ checkpoint as float tensors, as `read_compressed_tensors` does."""
    reader = Reader(coding)
    reader.get(*_GPTQ_SILENT)
    bits, size = reader.get("bits", default=4), reader.get("group_size", default=128)
    layout = reader.get("checkpoint_format", "format", default="gptq")
    reader.expect("pack_dtype", "int32")
    if bits not in (2, 4, 8):
        reader.problems.append(f"bits={bits}, not 2, 4 or 8")
    if layout not in ("gptq", "gptq_v2"):
        reader.problems.append(f"checkpoint_format={layout!r}, not 'gptq' or 'gptq_v2'")
    if size != -1 and not is_positive(size):
        reader.problems.append(f"group_size={size!r}, not -1 or a positive integer")
    check_read(reader, _PLACE)
    return _read(tensors, partial(_gptq_matrix, bits=bits, size=size, offset=int(layout == "gptq")))


def read_awq(coding: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Coding:
    """Presents the matrices of an AWQ checkpoint as float tensors, as `read_compressed_tensors` does."""
    reader = Reader(coding)
    reader.get(*_AWQ_SILENT)
    bits, size = reader.get("bits", "w_bit", default=4), reader.get("group_size", "q_group_size", default=128)
    version = reader.get("version", default="gemm")
    reader.expect("zero_point", True)
    if bits != 4:
        reader.problems.append(f"bits={bits}, not 4")
    if str(version).lower() != "gemm":
        reader.problems.append(f"version={version!r}, not 'gemm'")
    if size != -1 and not is_positive(size):
        reader.problems.append(f"group_size={size!r}, not -1 or a positive integer")
    check_read(reader, _PLACE)
    return _read(tensors, partial(_awq_matrix, size=size))


_Opened = QuantizedTensor | list[str]


def _read(tensors: Mapping[str, StoredTensor], open_matrix: Callable[..., _Opened]) -> Coding:
    found, problems = dict(tensors), list[str]()
    for name in [name for name in tensors if name.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        parts = {part: found.pop(f"{module}.{part}", None) for part in ("qweight", "qzeros", "scales", "g_idx")}
        opened = open_matrix(module, parts)
        if isinstance(opened, QuantizedTensor):
            found[opened.name] = opened
        else:
            problems += opened
    if problems:
        raise ConversionError(
            f"The codes of {len(problems)} tensors are not those of {_PLACE} in config.json:\n  "
            + "\n  ".join(sorted(problems))
            + "\nDownload the checkpoint again, or convert the original float checkpoint."
        )
    return Coding(found)


def _gptq_matrix(
    module: str, parts: Mapping[str, StoredTensor | None], *, bits: int, size: int, offset: int
) -> _Opened:
    codes, zeros, scales, group_of = (parts[part] for part in ("qweight", "qzeros", "scales", "g_idx"))
    per_word = 32 // bits
    if codes is None or codes.dtype != "I32" or len(codes.shape) != 2:
        return [_shape_problem(f"{module}.qweight", codes, f"I32[d_in / {per_word}, d_out]")]
    d_in, d_out = codes.shape[0] * per_word, codes.shape[1]
    groups = 1 if size == -1 else -(-d_in // size)
    wanted = (
        problem_of(f"{module}.scales", scales, _FLOATS, (groups, d_out)),
        problem_of(f"{module}.qzeros", zeros, ["I32"], (groups, -(-d_out // per_word))),
        None if group_of is None else problem_of(f"{module}.g_idx", group_of, ["I32", "I64"], (d_in,)),
    )
    if problems := [f"{problem} for group_size={size}" for problem in wanted if problem]:
        return problems
    assert scales is not None and zeros is not None, "problem_of would have named it"

    def decode() -> Codes:
        values = _signed(unpack_words(codes.read().T, bits, d_in), bits)
        # Masked, because a zero point of 0 minus 1 is stored as the largest code.
        zero_points = (unpack_words(zeros.read(), bits, d_out) + np.uint8(offset)) & np.uint8(2**bits - 1)
        group_numbers = _group_numbers(group_of, d_in, size, groups)
        return Codes(values, scales.read().astype(np.float32).T, _signed(zero_points, bits).T, group_numbers)

    scheme = f"int{bits}" if size == -1 else f"int{bits}, groups of {size}"
    is_adjacent = _group_numbers(group_of, d_in, size, groups) is None
    form = Form("int8" if bits == 8 else "int4", groups, has_zero_points=True) if is_adjacent else None
    return QuantizedTensor(codes.path, f"{module}.weight", scales.dtype, (d_out, d_in), scheme, decode, form)


def _awq_matrix(module: str, parts: Mapping[str, StoredTensor | None], *, size: int) -> _Opened:
    codes, zeros, scales = (parts[part] for part in ("qweight", "qzeros", "scales"))
    if codes is None or codes.dtype != "I32" or len(codes.shape) != 2:
        return [_shape_problem(f"{module}.qweight", codes, "I32[d_in, d_out / 8]")]
    d_in, d_out = codes.shape[0], codes.shape[1] * 8
    if size != -1 and d_in % size:
        return [f"{module}.qweight has {d_in} inputs, which group_size={size} does not divide"]
    groups = 1 if size == -1 else d_in // size
    wanted = (
        problem_of(f"{module}.scales", scales, _FLOATS, (groups, d_out)),
        problem_of(f"{module}.qzeros", zeros, ["I32"], (groups, d_out // 8)),
    )
    if problems := [f"{problem} for group_size={size}" for problem in wanted if problem]:
        return problems
    assert scales is not None and zeros is not None, "problem_of would have named it"

    def decode() -> Codes:
        values = _signed(_in_order(unpack_words(codes.read(), 4, d_out)), 4)
        zero_points = _signed(_in_order(unpack_words(zeros.read(), 4, d_out)), 4)
        return Codes(values.T, scales.read().astype(np.float32).T, zero_points.T)

    scheme = "int4" if size == -1 else f"int4, groups of {size}"
    form = Form("int4", groups, has_zero_points=True)
    return QuantizedTensor(codes.path, f"{module}.weight", scales.dtype, (d_out, d_in), scheme, decode, form)


def _signed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Shifts unsigned codes to int8 codes around 0; a shift of codes and zero points cancels."""
    return (codes - np.uint8(2 ** (bits - 1))).view(np.int8)


def _in_order(codes: np.ndarray) -> np.ndarray:
    """Reorders the outputs of each word of AWQ."""
    words = codes.reshape(len(codes), -1, len(AWQ_ORDER))
    return words[..., np.argsort(AWQ_ORDER)].reshape(codes.shape)


def _group_numbers(group_of: StoredTensor | None, d_in: int, size: int, groups: int) -> np.ndarray | None:
    """Returns the group of each input; None for equal groups of adjacent inputs."""
    adjacent = np.arange(d_in) // (d_in if size == -1 else size)
    found = adjacent if group_of is None else group_of.read()
    if found.min() < 0 or found.max() >= groups:
        name = "" if group_of is None else group_of.name
        raise ConversionError(f"{name} names a group outside of the {groups} groups. Download the checkpoint again.")
    return None if d_in % groups == 0 and np.array_equal(found, np.arange(d_in) // (d_in // groups)) else found


def _shape_problem(name: str, tensor: StoredTensor | None, expected: str) -> str:
    there = "is missing" if tensor is None else f"is {tensor.dtype}{list(tensor.shape)}"
    return f"{name} {there}; expected {expected}"
