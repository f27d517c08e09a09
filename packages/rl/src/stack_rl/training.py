"""Reinforcement learning from Python, by the trainer that `stack train` runs."""

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack_core.abi.config import to_mapping
from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries

__all__ = ["train"]


def train(
    model: str | Path,
    env: Any,
    reward: Any = None,
    algorithm: Any = "grpo",
    *,
    output: str | Path,
    data: Mapping[str, Any] | None = None,
    **config: Any,
) -> Any:
    """Trains a model on its own episodes, as `stack train` does with `data.name: rollouts`.

        train("runs/chat", "tasks.jsonl", "math", "grpo", output="runs/math", run={"steps": 200})

    Args:
      model: run or checkpoint to start from, such as "runs/chat" or "hf:DIR" (`run.init_from`).
      env: environment: a registered name, a mapping or config of its settings, or a path of JSONL files with prompts.
      reward: one reward or a list of them, for environments with rewards: a registered name, "module:function", a
        mapping or config of settings, or a function of a `Completion`. None keeps the rewards of `env`.
      algorithm: objective: a registered name such as "grpo" or "ppo", or a mapping or config of its settings.
      output: directory of the new run.
      data: other keys of the section `data`, such as `groups`, `group_size` and `seq_tokens`.
      config: other sections of the run, such as `run={"steps": 100}` or `optimizer={"name": "adamw"}`; and `resume`,
        `allow` and `terminal`.

    Returns:
      The summary of the run, as of `stack_train.train`.

    Raises:
      ConfigError: an argument is not usable, or the environment has no rewards to set.
      StackError: as `stack_train.train`; stack-train is not installed.
    """
    run = to_mapping(config.get("run", {}))
    for name, given, argument in (
        ("objective", config, "algorithm"),
        ("environment", data or {}, "env"),
        ("init_from", run, "model"),
    ):
        if name in given and given[name] is not None:
            raise ConfigError(f"{name}={given[name]!r} and the argument {argument} set the same key. Leave {name} out.")
    whole = {
        **config,
        "output": str(output),
        "data": {**(data or {}), "name": "rollouts", "environment": _environment(env, reward)},
        "objective": algorithm,
        "run": {**run, "init_from": str(model)},
    }
    options = {name: whole.pop(name) for name in ("resume", "allow", "terminal") if name in whole}
    return _trainer()(whole, **options)


def _environment(env: Any, reward: Any) -> Any:
    """Returns the environment's settings with the rewards, as names or objects."""
    if isinstance(env, Path) or (isinstance(env, str) and env not in registries.environments and env.endswith("jsonl")):
        env = {"name": "prompts", "source": str(env)}
    if isinstance(env, str):
        env = {"name": env}
    elif not isinstance(env, Mapping):
        if not hasattr(env, "name"):
            raise ConfigError(
                f"env is a {type(env).__name__}; expected the name of an environment, its settings, or a path of JSONL "
                f"files with prompts. Names: {', '.join(registries.environments)}."
            )
        if reward is None:
            return env
        env = {each.name: getattr(env, each.name) for each in dataclasses.fields(env)}
    if reward is None:
        return env
    if "name" not in env:
        raise ConfigError(
            f"env is {env!r}, which lacks the key name. Set it to one of: {', '.join(registries.environments)}."
        )
    kind = registries.environments[env["name"]]
    if "rewards" not in [each.name for each in dataclasses.fields(kind)]:
        raise ConfigError(f"The environment {env['name']!r} computes its own rewards. Leave reward out.")
    return {**env, "rewards": tuple(reward) if isinstance(reward, (list, tuple)) else (reward,)}


def _trainer() -> Any:
    """Imports the function behind `stack train`, which another package registers."""
    registries.commands["train"]  # raises UnknownName, which names the package to install
    entry = next(each for each in registries.commands.entries() if each.name == "train")
    module, _, name = entry.details["function"].partition(":")
    return getattr(importlib.import_module(module), name)
