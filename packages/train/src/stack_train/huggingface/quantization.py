"""Quantized checkpoints of Hugging Face, presented as float checkpoints."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from stack_core.abi.errors import ConversionError, nearest
from stack_train.huggingface.blocks import read_fp8, read_mxfp4
from stack_train.huggingface.codes import Coding
from stack_train.huggingface.compressed_tensors import read_compressed_tensors
from stack_train.huggingface.gptq import read_awq, read_gptq
from stack_train.safetensors_files import StoredTensor

__all__ = ["QUANTIZATION", "READERS", "with_codes"]

QUANTIZATION = "quantization_config"
"""The key of `config.json` with the quantization of a checkpoint's weights."""

READERS: Final[Mapping[str, Callable[[Mapping[str, Any], Mapping[str, StoredTensor]], Coding]]] = MappingProxyType(
    {
        "compressed-tensors": read_compressed_tensors,
        "gptq": read_gptq,
        "awq": read_awq,
        "fp8": read_fp8,
        "mxfp4": read_mxfp4,
    }
)
"""Readers of quantized checkpoints, by `quant_method`."""


def with_codes(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> tuple[Mapping[str, Any], Coding]:
    """Presents a quantized checkpoint as a float checkpoint; returns any other one unchanged.

    Args:
      config: content of `config.json`.
      tensors: tensors of the checkpoint by name.

    Returns:
      The config without the quantization, and the tensors, which are dequantized when they are read.

    Raises:
      ConversionError: the quantization is not supported, or tensors are missing or do not fit; names each.
    """
    coding = config.get(QUANTIZATION)
    if coding is None:
        return config, Coding(tensors)
    method = coding.get("quant_method") if isinstance(coding, Mapping) else None
    if method not in READERS:
        raise ConversionError(
            f"{QUANTIZATION} of config.json has quant_method={method!r}.{nearest(str(method), READERS)} Read are "
            f"{', '.join(READERS)}. Convert the original float checkpoint."
        )
    return {key: value for key, value in config.items() if key != QUANTIZATION}, READERS[method](coding, tensors)
