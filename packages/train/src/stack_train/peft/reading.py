"""Reading of PEFT directories as factors of parameters; all tensors are validated before values are read."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from stack_core.abi.adapters import Adapters, LowRankFactors
from stack_core.abi.errors import ConversionError, nearest
from stack_train.peft.modules import AdaptedModule, modules_of, outer_tensors
from stack_train.peft.settings import PeftSettings, read_settings
from stack_train.safetensors_files import StoredTensor, read_tensors

__all__ = ["BASE_DIGESTS", "STEM", "read_base_copies", "read_base_digests", "read_peft"]

STEM = "adapter_model"
BASE_DIGESTS = "stack_base_digests"
"""The key of the file's metadata with the shapes, dtypes and digests of the base's leaves."""

# Versions of PEFT write DoRA's magnitude with or without ".weight".
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(\.weight)?")

# PEFT saves copies of embeddings and head if they have adapters or if `save_embedding_layers` is set.
_COPY = re.compile(r"base_model\.model\.(?P<module>.+?)(\.base_layer)?\.weight")
_LOOKUP = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_embedding_[AB]")

_Parts = Mapping[str, StoredTensor]


def read_peft(directory: Path, config: Any) -> Adapters:
    """Reads an adapter for a model with this config.

    Raises:
      ConversionError: the adapter does not fit the model; names each tensor that is missing, unknown or has the wrong
        shape.
    """
    settings, modules = read_settings(directory), modules_of(config)
    stored = read_tensors(directory, STEM)
    copies = _copies(stored, config)
    tensors, problems = _by_module({name: stored[name] for name in stored if name not in copies}, modules)
    problems += [
        f"target_modules has {target!r}, which none of the tensors is of"
        for target in settings.unmatched_targets(list(tensors))
    ]
    for name, parts in tensors.items():
        problems += _module_mistakes(modules[name], parts, settings)
    of_parameters: dict[str, list[AdaptedModule]] = {}
    for module in modules.values():
        of_parameters.setdefault(module.parameter, []).append(module)
    adapted = {
        parameter: members
        for parameter, members in of_parameters.items()
        if any(member.name in tensors for member in members)
    }
    for members in adapted.values():
        problems += _layer_mistakes(members, tensors, settings)
    if not (problems or adapted):
        problems = ["it holds no tensors"]
    if problems:
        raise ConversionError(
            f"The adapter in {directory} does not fit the model ({config.name}):\n  " + "\n  ".join(sorted(problems))
        )
    return {parameter: _factors(members, tensors, settings) for parameter, members in adapted.items()}


def read_base_copies(directory: Path, config: Any) -> dict[str, tuple[str, np.ndarray]]:
    """Reads the copies of the base's embeddings and head in an adapter's file.

    Returns:
      For each parameter path, the name of the tensor and its values in the parameter's layout.
    """
    stored, outer = read_tensors(directory, STEM), outer_tensors(config)
    found = {}
    for name, tensor in _copies(stored, config).items():
        rule = outer[tensor]
        values = stored[name].read()
        found[rule.parameter] = (name, values.T if rule.transposed else values)
    return found


def _copies(stored: Mapping[str, StoredTensor], config: Any) -> dict[str, str]:
    """Maps the name of each copy of a base tensor to the name of the original."""
    outer, found = outer_tensors(config), dict[str, str]()
    for name, tensor in stored.items():
        match = _COPY.fullmatch(name)
        original = None if match is None else f"{match['module']}.weight"
        if original in outer and tensor.numpy_dtype is not None:
            found[name] = original
    return found


def read_base_digests(directory: Path) -> Mapping[str, Any]:
    """Returns the recorded spec and digest of each leaf of the base, by path; empty if the file records none."""
    path = directory / f"{STEM}.safetensors"
    with safe_open(path, framework="numpy") as file:
        # The digests are in the metadata, which PEFT ignores.
        return json.loads((file.metadata() or {}).get(BASE_DIGESTS, "{}"))


def _by_module(
    stored: Mapping[str, StoredTensor], modules: Mapping[str, AdaptedModule]
) -> tuple[dict[str, dict[str, StoredTensor]], list[str]]:
    found: dict[str, dict[str, StoredTensor]] = {}
    problems = []
    for name, tensor in stored.items():
        if (lookup := _LOOKUP.fullmatch(name)) is not None:
            problems.append(
                f"{name} adapts the lookup of {lookup['module']}; adapters of products of matrices alone are read. "
                "Merge it into its base with PEFT (merge_and_unload), and convert that"
            )
            continue
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in modules:
            near = "" if match is None else nearest(match["module"], modules)
            problems.append(f"{name} is of no linear map of the model.{near}")
        else:
            found.setdefault(match["module"], {})[match["part"]] = tensor
    return found, problems


def _module_mistakes(module: AdaptedModule, parts: _Parts, settings: PeftSettings) -> list[str]:
    rank = settings.rank_of(module.name)
    expected: dict[str, tuple[int, ...]] = {"lora_A": (rank, module.d_in), "lora_B": (module.d_out, rank)}
    if settings.magnitude:
        expected["lora_magnitude_vector"] = (module.d_out,)
    problems = [f"{module.name}.{part} is missing" for part in expected if part not in parts]
    problems += [f"{module.name}.{part}: use_dora is not set" for part in parts if part not in expected]
    problems += [
        f"{tensor.name} has shape {tensor.shape}; expected {expected[part]}, of rank {rank}"
        for part, tensor in parts.items()
        if part in expected and tensor.shape != expected[part]
    ]
    problems += [
        f"{tensor.name} has dtype {tensor.dtype}; F32, F16 and BF16 are read"
        for tensor in parts.values()
        if tensor.numpy_dtype is None
    ]
    return problems


def _layer_mistakes(
    members: Sequence[AdaptedModule], tensors: Mapping[str, _Parts], settings: PeftSettings
) -> list[str]:
    """Lists problems of stacked layers: a layer without an adapter, or layers with different ranks or scales."""
    here = [member.name for member in members if member.name in tensors]
    problems = [
        f"{member.name} has no tensors, but {here[0]} has"
        for member in members
        if member.name not in tensors and (member.layer is None or settings.has_layer(member.layer))
    ]
    # Reversed, so each kind keeps the name of its first layer.
    kinds = {(settings.rank_of(name), settings.scale_of(name)): name for name in reversed(here)}
    if len(kinds) > 1:
        listing = ", ".join(f"{name} rank {rank} and scale {scale:g}" for (rank, scale), name in kinds.items())
        problems.append(f"{members[0].parameter} holds layers of different ranks or scales: {listing}")
    if not settings.magnitude or len(here) == len(members):
        return problems
    return [*problems, f"{members[0].parameter}: with use_dora every layer needs an adapter"]


def _factors(members: Sequence[AdaptedModule], tensors: Mapping[str, _Parts], settings: PeftSettings) -> LowRankFactors:
    name = next(member.name for member in members if member.name in tensors)
    dtypes = {tensor.numpy_dtype for member in members for tensor in tensors.get(member.name, {}).values()}
    # float32 represents F16 and BF16 exactly.
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    stacked = members[0].place is not None

    def joined(part: str, shape: tuple[int, ...]) -> np.ndarray:
        """Stacks a part of all layers, with zeros for layers without an adapter."""
        arrays = [
            # PEFT stores A as [rank, d_in], the transpose of `down`.
            tensors[member.name][part].read().T.astype(dtype) if member.name in tensors else np.zeros(shape, dtype)
            for member in members
        ]
        return np.stack(arrays) if stacked else arrays[0]

    rank = settings.rank_of(name)
    return LowRankFactors(
        down=joined("lora_A", (members[0].d_in, rank)),
        up=joined("lora_B", (rank, members[0].d_out)),
        scale=settings.scale_of(name),
        magnitude=joined("lora_magnitude_vector", (members[0].d_out,)) if settings.magnitude else None,
    )
