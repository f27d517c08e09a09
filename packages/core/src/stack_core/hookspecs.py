"""The hooks of ABI 1: what a plugin may register. `docs/hooks.md` has a section with an example for each.

Every `stack_register_<things>(registry)` hook is called once, on first use of that registry, with a `Registrar`:
`registry.add(name, target, **details)`. Targets are objects or, better, "module:attribute" strings, so that
registering imports nothing.
"""

from collections.abc import Mapping
from typing import Any

import pluggy

from stack_core.registry import Registrar

__all__ = ["DETAILS", "HOOKS", "REGISTRY_KINDS", "hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("stack")
hookimpl = pluggy.HookimplMarker("stack")


@hookspec
def stack_register_chips(registry: Registrar) -> None:
    """Chips by kind: a `stack_core.hardware.Chip`, or a function without arguments that measures one."""


@hookspec
def stack_register_ops(registry: Registrar) -> None:
    """Implementations of ops, each an `OpImplementation` named "op/implementation"."""


@hookspec
def stack_register_tuned_tables(registry: Registrar) -> None:
    """Tuned tables, each a `TunedTable`; of several that know a call, the first by name is followed."""


@hookspec
def stack_register_array_types(registry: Registrar) -> None:
    """Quantized array classes, each a pytree with a `__stack_qview__` method."""


@hookspec
def stack_register_models(registry: Registrar) -> None:
    """Model families, each a `ModelFamily`."""


@hookspec
def stack_register_data_sources(registry: Registrar) -> None:
    """Data sources by the scheme of their address, each a function from the rest of the address to a `DataSource`."""


@hookspec
def stack_register_optimizers(registry: Registrar) -> None:
    """Optimizers, each a config class with `build(steps, decayed)` and `learning_rate_schedule(steps)`."""


@hookspec
def stack_register_objectives(registry: Registrar) -> None:
    """Objectives, each a config class whose `build()` returns an `Objective`."""


@hookspec
def stack_register_trainers(registry: Registrar) -> None:
    """Trainers, each a `Trainer` class."""


@hookspec
def stack_register_checkpoint_formats(registry: Registrar) -> None:
    """Checkpoint formats by the scheme of their address, such as "hf", which convert or open models."""


@hookspec
def stack_register_launchers(registry: Registrar) -> None:
    """Launchers, each of which runs a function on a mesh as one generation of processes."""


@hookspec
def stack_register_engines(registry: Registrar) -> None:
    """Generation engines, each an `Engine` class made of a `GenerativeCheckpoint` and a config."""


@hookspec
def stack_register_rewards(registry: Registrar) -> None:
    """Rewards: host functions from a prompt and its completions to scalars."""


@hookspec
def stack_register_observers(registry: Registrar) -> None:
    """Observers, each a function from an `ObserverContext` to an `Observer`, or to None when it has nothing to do."""


@hookspec
def stack_register_commands(registry: Registrar) -> None:
    """Subcommands of `stack`, each a function; `help` is the line that `stack --help` shows."""


@hookspec
def stack_register_quantizers(registry: Registrar) -> None:
    """Quantizers, each a `Quantizer`, by the name of the section of a run that holds its recipe."""


@hookspec
def stack_register_configs(registry: Registrar) -> None:
    """Config classes of the sections that a package adds to a run, by the section's name."""


@hookspec
def stack_register_analyses(registry: Registrar) -> None:
    """Analyses of traces, each a function `(trace, *, options)`; `help` is its line in `stack profile --help`."""


@hookspec(firstresult=True)
def stack_select_op(call: Any, chip: Any, candidates: tuple[str, ...]) -> str | None:
    """Chooses among the implementations that support an `OpCall`, by name; None leaves it to the next plugin."""


HOOKS = tuple(name for name in tuple(globals()) if name.startswith("stack_"))
REGISTRY_KINDS = tuple(name.removeprefix("stack_register_") for name in HOOKS if name.startswith("stack_register_"))

DETAILS: Mapping[str, Mapping[str, type]] = {
    "chips": {"device_kinds": tuple},
    "commands": {"help": str, "huge_pages": bool},
    "analyses": {"help": str},
}
"""The details that `registry.add` takes beside name and target, with their types, by registry."""
