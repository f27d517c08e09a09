"""Reading of PEFT's `adapter_config.json`."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.errors import ConversionError

__all__ = ["CONFIG", "PeftSettings", "read_settings"]

CONFIG = "adapter_config.json"

# The only supported values of these keys, apart from null. Other values change the adapter's outputs.
_PLAIN = {"peft_type": "LORA", "bias": "none"}
_READ = """
    r lora_alpha rank_pattern alpha_pattern use_rslora use_dora target_modules layers_to_transform
    base_model_name_or_path init_lora_weights
"""
# Initialization, training and placement of the adapter, which do not change what its tensors compute.
_HARMLESS = """
    auto_mapping corda_config ensure_weight_tying eva_config exclude_modules inference_mode layers_pattern loftq_config
    lora_dropout lora_ga_config megatron_core peft_version qalora_group_size revision runtime_config task_type
"""
_KNOWN = {*_READ.split(), *_HARMLESS.split(), *_PLAIN}
# Initializations that also modify the base, so the adapter does not fit the published base.
_CHANGES_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")


@dataclass(frozen=True)
class PeftSettings:
    """The config of a LoRA or DoRA adapter.

    Attributes:
      rank: default rank.
      alpha: default alpha; the scale of an adapter is alpha / rank, or alpha / sqrt(rank) if `rank_stabilized`.
      rank_pattern, alpha_pattern: ranks and alphas of specific modules, by regular expression for the end of the name.
      rank_stabilized: True for rsLoRA.
      magnitude: True for DoRA.
      targets: modules with adapters, by name, by the last segments of the name, or by a regular expression with the
        prefix "^".
      layers: indices of the layers with adapters; None means all layers.
      base: name or directory of the base model, or None.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    magnitude: bool
    targets: Sequence[str]
    layers: Sequence[int] | None
    base: str | None

    def rank_of(self, module: str) -> int:
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's low-rank product."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (rank**0.5 if self.rank_stabilized else rank)

    def has_layer(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def unmatched_targets(self, modules: Sequence[str]) -> list[str]:
        """Lists the entries of `target_modules` that match none of the modules."""
        return [target for target in self.targets if not any(_is_target(target, module) for module in modules)]


def read_settings(directory: Path) -> PeftSettings:
    """Reads the config of an adapter.

    Raises:
      ConversionError: the file is missing or has unsupported settings; names each key.
    """
    path = directory / CONFIG
    try:
        mapping = json.loads(path.read_bytes())
        settings = _parsed(mapping)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(
            f"{path} cannot be read: {type(error).__name__}: {error}. A directory of PEFT has one."
        ) from error
    problems = [
        f"{key} is {mapping[key]!r}; {expected!r} alone is read"
        for key, expected in _PLAIN.items()
        if mapping.get(key) not in (None, expected)
    ]
    problems += [
        f"{key} is {value!r}, which is not read" for key, value in mapping.items() if value and key not in _KNOWN
    ]
    problems += _malformed(settings)
    initial = mapping.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(_CHANGES_BASE):
        problems.append(f"init_lora_weights is {initial!r}, which changed the base: save it with PEFT's conversion")
    if problems:
        raise ConversionError(f"{path} describes no adapter that is read:\n  " + "\n  ".join(problems))
    return settings


def _malformed(settings: PeftSettings) -> list[str]:
    """Describes malformed patterns."""
    problems = []
    targets = [target for target in settings.targets if target.startswith("^")]
    for pattern in (*settings.rank_pattern, *settings.alpha_pattern, *targets):
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(f"{pattern!r} is not a regular expression: {error}")
    return problems


def _parsed(mapping: Mapping[str, Any]) -> PeftSettings:
    layers, targets = mapping.get("layers_to_transform"), mapping.get("target_modules") or ()
    if isinstance(targets, str):  # one regular expression, or "all-linear"
        targets = () if targets == "all-linear" else (f"^{targets}$",)
    return PeftSettings(
        rank=int(mapping["r"]),
        alpha=float(mapping["lora_alpha"]),
        rank_pattern={key: int(value) for key, value in (mapping.get("rank_pattern") or {}).items()},
        alpha_pattern={key: float(value) for key, value in (mapping.get("alpha_pattern") or {}).items()},
        rank_stabilized=bool(mapping.get("use_rslora")),
        magnitude=bool(mapping.get("use_dora")),
        targets=tuple(targets),
        # PEFT accepts a single index.
        layers=(layers,) if isinstance(layers, int) else layers,
        base=mapping.get("base_model_name_or_path"),
    )


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Looks up a module's value as PEFT does: the first key that matches the end of the module's name."""
    found = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def _is_target(target: str, module: str) -> bool:
    if target.startswith("^"):
        return re.fullmatch(target, module) is not None
    return module == target or module.endswith(f".{target}")
