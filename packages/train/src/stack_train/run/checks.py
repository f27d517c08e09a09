"""Checks of a resolved config, which run before anything is built or written."""

import warnings
from collections.abc import Mapping
from typing import Any

from stack_core.abi.adapters import AdaptsModels
from stack_core.abi.config import differences, dotted_keys, is_under, to_mapping, with_current_keys
from stack_core.abi.errors import ConfigError, nearest
from stack_core.abi.plugins import registries
from stack_core.runtime.config import ClusterConfig
from stack_train.data.ramp import check_ramp
from stack_train.data.settings import BPE, saved_addresses, source_addresses
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.objectives import as_objective, check_accumulation, check_inputs
from stack_train.run.config import PipelineConfig, RunConfig
from stack_train.run.resolve import ResolvedRun
from stack_train.run.source_files import changed_files
from stack_train.run.start import Start, model_differences
from stack_train.run.transforms import recipe_differences, transform_names

__all__ = ["check", "check_sections", "fixed_differences"]

# Keys that affect the trained parameters must not change on resume. The length, directory and outputs may.
_FIXED = ("model", "data", "objective", "optimizer", "precision", "run.accumulation_steps", "run.ramp", "run.seed")
_FREE = ("data.prefetch_batches", "model.remat", "model.unroll")


def check(run: ResolvedRun, allowed: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Checks a run's sections, its starting point and, on resume, the settings that affect training.

    Args:
      run: the run.
      allowed: config keys that may differ from the resumed run, or from the starting point.

    Returns:
      Lines with the allowed differences to the resumed run, such as "optimizer.learning_rate: 0.1, not 0.2".

    Raises:
      ConfigError: sections contradict each other, a key of `allowed` does not exist or would not act, or a key that is
        not allowed differs; names each.
    """
    _check_allowed(run, allowed)
    _check_start(run, allowed)
    changes = () if run.resumed is None else _changes(run, run.resumed, allowed)
    check_sections(run.config)
    return changes


def check_sections(config: RunConfig) -> None:
    """Raises a ConfigError if sections contradict each other or a setting would have no effect."""
    _check_used(config)
    config.batches.check(config.model)
    shapes = config.batches.spec(config.model)
    objective = as_objective(config.objective.build())
    check_inputs(objective, shapes)
    check_accumulation(objective, config.run.accumulation_steps)
    if hasattr(config.model, "start_token") and "source_tokens" not in shapes:
        raise ConfigError(
            f"model.name={config.model.name!r} generates targets from sources, and data.name={config.data.name!r} has "
            "no sources. Set data.name to pairs or spans, or choose another model."
        )
    if "controlnet" in config.sections and config.run.init_from is None:
        raise ConfigError(
            "Section controlnet trains on a frozen UNet, whose weights come from run.init_from. Set it to a run, such "
            "as the result of stack convert."
        )
    if getattr(objective, "needs_start", False) and config.run.init_from is None:
        raise ConfigError(
            f"objective.name={config.objective.name!r} distills the model that the run starts from, and run.init_from "
            "is not set. Set it to the run of the teacher."
        )
    if config.run.minutes is not None and config.cluster.hosts is not None:
        raise ConfigError(
            "run.minutes limits one session, and cluster.hosts may start several. Leave run.minutes out, and stop the "
            "driver with SIGTERM."
        )
    batch_size = next(iter(shapes.values())).shape[0]
    if batch_size % config.run.accumulation_steps:
        raise ConfigError(
            f"data.batch_size {batch_size} is not a multiple of run.accumulation_steps "
            f"{config.run.accumulation_steps}. Change one of them."
        )
    check_ramp(config.run.ramp, batch_size)


def _check_used(config: RunConfig) -> None:
    """Raises a ConfigError for settings of several hosts or pipeline stages in a run with one."""
    single = {
        "cluster": (config.cluster, ClusterConfig(), config.cluster.hosts is None, "cluster.hosts"),
        "run.pipeline": (config.run.pipeline, PipelineConfig(), config.mesh.stage == 1, "mesh.stage"),
    }
    for section, (given, default, is_single, key) in single.items():
        if is_single and (lines := differences(to_mapping(given), to_mapping(default))):
            name, _, value = lines[0].partition(":")
            raise ConfigError(
                f"{section}.{name} is{value.partition(', not')[0]}, which has no effect without {key}. Set {key}, or "
                f"leave {section}.{name} out."
            )


def fixed_differences(config: RunConfig, saved: Mapping[str, Any]) -> list[str]:
    """Lists differences from a saved config in keys that affect training, such as "data.batch_size: 4, not 8"."""
    # Configs without the section `precision` come from runs that trained parameters in their published dtype.
    precision = {"params": saved.get("model", {}).get("param_dtype", "float32")}
    lines = differences(to_mapping(config), {"precision": precision, **with_current_keys(RunConfig, saved)})
    # Sections of transforms change the model, so they are fixed as well.
    fixed = (*_FIXED, *registries.transforms.names())
    return [line for line in lines if is_under(line, fixed) and not is_under(line, _FREE)]


def _check_allowed(run: ResolvedRun, allowed: tuple[str, ...]) -> None:
    """Raises a ConfigError if `--allow` is used without an earlier run to differ from, or names an unknown key."""
    if not allowed:
        return
    if run.resumed is None and run.start is None:
        raise ConfigError(
            f"--allow {allowed[0]} has no effect: this run does not start from another run. Leave it out, or give "
            "--resume or run.init_from."
        )
    # Also keys of the saved config only: to omit such a key now is a difference.
    keys = dotted_keys(to_mapping(run.config)) | dotted_keys(run.resumed or {})
    for key in allowed:
        if key not in keys:
            raise ConfigError(
                f"--allow {key}: the config has no such key.{nearest(key, keys)} Give a whole key or section, such as "
                "optimizer.learning_rate or data."
            )


def _check_start(run: ResolvedRun, allowed: tuple[str, ...]) -> None:
    """Checks that the run fits its start; warns if the start has transforms that the run lacks."""
    config, start = run.config, run.start
    if config.run.adapters_from is not None and run.transforms.adapting is None:
        raise ConfigError(
            "run.adapters_from needs a section that adds adapters, such as lora. Add one, or leave it out."
        )
    if start is None:
        members = zip(transform_names(config), run.transforms.members, strict=True)
        if names := [name for name, member in members if isinstance(member, AdaptsModels)]:
            raise ConfigError(
                f"Section {names[0]} trains adapters of a frozen model, and this run's model would stay random: "
                "run.init_from is not set. Set it to a run or hf:DIR, or leave the section out to train all parameters."
            )
        return
    source = config.run.init_from
    lines = [*model_differences(config.model, start.model), *_tokenizer_difference(config.data, start)]
    if changed := [line for line in lines if not is_under(line, allowed)]:
        raise ConfigError(
            f"The model or its tokenizer differs from {source}, whose weights the run starts from:\n"
            f"  {_joined(changed)}\n"
            "Leave these keys out to take the source's, or name those that are meant to differ: "
            f"--allow {changed[0].partition(':')[0]}."
        )
    if start.run is None:
        return
    if missing := [name for name in transform_names(start.run) if name not in transform_names(config)]:
        warnings.warn(
            f"The model of {source} is transformed by section {' and '.join(missing)} of its config, which this run's "
            "does not have: it starts from the floats that the parameters of the family's model stand for.",
            stacklevel=4,
        )
    if lines := recipe_differences(config, start.run):
        raise ConfigError(
            f"The model of {source} is transformed by another recipe; here is this run's, not that one's:\n"
            f"  {_joined(lines)}\nStart from the run that it was made from, or use the same recipe."
        )


def _tokenizer_difference(data: Any, start: Start) -> list[str]:
    """Returns a line if `data.tokenizer` differs from the tokenizer of the start."""
    tokenizer = getattr(data, "tokenizer", None)
    if tokenizer is None or start.tokenizer is None or tokenizer == str(start.tokenizer):
        return []
    load = HuggingFaceTokenizer.load
    # A copy of the tokenizer in another directory is the same tokenizer.
    if tokenizer != BPE and load(tokenizer).digest == load(start.tokenizer).digest:
        return []
    return [f"data.tokenizer: {tokenizer!r}, not {str(start.tokenizer)!r}"]


def _changes(run: ResolvedRun, saved: Mapping[str, Any], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Lists the changed config keys and data files that affect the training of a resumed run."""
    data = run.config.data
    found = fixed_differences(run.config, saved)
    # Another source is already listed as a difference, and all its files would be new.
    if source_addresses(data) == saved_addresses(saved.get("data", {})):
        found += changed_files(data, run.directory)
    if changed := [line for line in found if not is_under(line, allowed)]:
        raise ConfigError(
            f"This config is not that of the run in {run.directory.path}:\n  {_joined(changed)}\n"
            "Restore these values to resume; name those that may change, as in --allow "
            f"{changed[0].partition(':')[0]}; or give the new run an output of its own and run.init_from."
        )
    return tuple(found)


def _joined(lines: list[str]) -> str:
    return "\n  ".join(lines)
