"""Writing of adapters as directories that PEFT loads."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.adapters import Adapters
from stack_core.abi.errors import ConversionError
from stack_train.peft.modules import AdaptedModule, modules_of
from stack_train.peft.reading import BASE_DIGESTS, STEM
from stack_train.peft.settings import CONFIG
from stack_train.safetensors_files import TensorSpec, write_shards

__all__ = ["write_peft"]


def write_peft(
    directory: Path, adapters: Adapters, config: Any, *, base: str | None, digests: Mapping[str, Any]
) -> Sequence[TensorSpec]:
    """Writes the adapters of a model with this config, in the dtype of their factors; returns the written tensors.

    Args:
      base: name or directory of the base model, or None.
      digests: shapes, dtypes and digests of the base's leaves, as JSON values; empty if unknown.

    Raises:
      ConversionError: PEFT cannot represent an adapter; names the parameters.
    """
    modules = modules_of(config)
    known = {module.parameter for module in modules.values()}
    if unknown := [parameter for parameter in adapters if parameter not in known]:
        raise ConversionError(
            f"PEFT adapts linear maps; the transformers model has none for {', '.join(unknown)}. Leave these out by a "
            "rule of rank 0, or convert the run with its adapters merged: stack convert RUN hf:DIR."
        )
    kinds = {each.magnitude is not None for each in adapters.values()}
    if len(kinds) > 1:
        raise ConversionError(
            "Some adapters have magnitudes (DoRA) and some do not; PEFT supports one kind per model. Convert the run "
            "with its adapters merged: stack convert RUN hf:DIR."
        )
    adapted = {name: module for name, module in modules.items() if module.parameter in adapters}
    settings = {**_FIXED, **_settings(adapted, modules, adapters), "base_model_name_or_path": base}
    (directory / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = [pair for module in adapted.values() for pair in _tensors(module, adapters)]
    specs = [TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in tensors]
    metadata = {BASE_DIGESTS: json.dumps(digests)} if digests else {}
    write_shards(directory, [specs], tensors, STEM, metadata=metadata)
    return specs


_FIXED: Mapping[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "use_rslora": False,
}


def _settings(
    adapted: Mapping[str, AdaptedModule], modules: Mapping[str, AdaptedModule], adapters: Adapters
) -> dict[str, Any]:
    ranks = {name: adapters[module.parameter].rank for name, module in adapted.items()}
    # PEFT scales by alpha / rank, since `use_rslora` is written as false; this alpha reproduces any scale exactly.
    alphas = {name: adapters[module.parameter].scale * ranks[name] for name, module in adapted.items()}
    # The most common values become the defaults, which keeps the patterns short.
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: _number(value) for name, value in alphas.items() if value != alpha},
        "target_modules": _targets(adapted, modules),
        "use_dora": any(each.magnitude is not None for each in adapters.values()),
    }


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _targets(adapted: Mapping[str, AdaptedModule], modules: Mapping[str, AdaptedModule]) -> list[str]:
    """Returns the last segment of a module's name if all modules with that segment are adapted, else the full name."""
    left = {name.rpartition(".")[2] for name in modules if name not in adapted}
    return sorted({name if name.rpartition(".")[2] in left else name.rpartition(".")[2] for name in adapted})


def _tensors(module: AdaptedModule, adapters: Adapters) -> list[tuple[str, np.ndarray]]:
    factors = adapters[module.parameter]
    parts = {"lora_A.weight": factors.down, "lora_B.weight": factors.up, "lora_magnitude_vector": factors.magnitude}
    arrays = {part: np.asarray(array) for part, array in parts.items() if array is not None}
    return [
        (f"base_model.model.{module.name}.{part}", (array if module.place is None else array[module.place]).T)
        for part, array in arrays.items()
    ]
