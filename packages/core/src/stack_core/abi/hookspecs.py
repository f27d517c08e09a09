"""The hooks of ABI 1: what a plugin may register. `docs/hooks.md` has a section with an example for each.

Every `stack_register_<things>(registry)` hook is called once, on first use of that registry, with a `Registrar`:
`registry.add(name, target, **details)`. Targets are objects or, better, "module:attribute" strings, so that
registering imports nothing.
"""

from collections.abc import Mapping
from typing import Any

import pluggy

from stack_core.abi.registry import Registrar

__all__ = ["DETAILS", "HOOKS", "REGISTRY_KINDS", "hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("stack")
hookimpl = pluggy.HookimplMarker("stack")


@hookspec
def stack_register_chips(registry: Registrar) -> None:
    """Chips by kind: a `stack_core.chips.Chip`, or a function without arguments that measures one."""


@hookspec
def stack_register_ops(registry: Registrar) -> None:
    """Implementations of ops, each an `OpImplementation` named "op/implementation"."""


@hookspec
def stack_register_op_definitions(registry: Registrar) -> None:
    """Ops by name, each an `Op`; `function` names what models call, `suite` the `OpSuite` of its contract."""


@hookspec
def stack_register_tuned_tables(registry: Registrar) -> None:
    """Tuned tables, each a `TunedTable`; of several that know a call, the first by name is followed."""


@hookspec
def stack_register_models(registry: Registrar) -> None:
    """Model families, each a `ModelFamily`."""


@hookspec
def stack_register_data_sources(registry: Registrar) -> None:
    """Data sources by the scheme of their address, each a function from the rest of the address to a `DataSource`."""


@hookspec
def stack_register_batches(registry: Registrar) -> None:
    """Kinds of data by the name that `data.kind` selects, each a `DataKind`."""


@hookspec
def stack_register_optimizers(registry: Registrar) -> None:
    """Optimizers, each a config class derived from `stack_train.optim.OptimizerConfig`."""


@hookspec
def stack_register_objectives(registry: Registrar) -> None:
    """Objectives, each a config class whose `build()` returns an `Objective`."""


@hookspec
def stack_register_model_formats(registry: Registrar) -> None:
    """Formats of models on disk by the scheme of their address, such as "hf", each a `ModelFormat`."""


@hookspec
def stack_register_engines(registry: Registrar) -> None:
    """Generation engines, each an `Engine` class made of a `GenerativeCheckpoint` and a config."""


@hookspec
def stack_register_rewards(registry: Registrar) -> None:
    """Rewards by name, each a `Reward`: a function on the host that scores a completion."""


@hookspec
def stack_register_environments(registry: Registrar) -> None:
    """Environments that a policy acts in by name, each an `EnvironmentKind`."""


@hookspec
def stack_register_launchers(registry: Registrar) -> None:
    """Launchers of agents, each a `Launcher` class made of a `ClusterConfig`."""


@hookspec
def stack_register_observers(registry: Registrar) -> None:
    """Observers, each a function from an `ObserverContext` to an `Observer`, or to None when it has nothing to do."""


@hookspec
def stack_register_commands(registry: Registrar) -> None:
    """Subcommands of `stack`, each a function; `help` is the line that `stack --help` shows."""


@hookspec
def stack_register_transforms(registry: Registrar) -> None:
    """Transforms of models by the section that configures them, each a function `(config, sample_batch)` to one."""


@hookspec
def stack_register_methods(registry: Registrar) -> None:
    """Methods of quantization by the name that `method` selects, each a `stack_quant.methods.Method`."""


@hookspec
def stack_register_sections(registry: Registrar) -> None:
    """Config classes of the sections that a package adds to a run, by the section's name."""


@hookspec
def stack_register_analyses(registry: Registrar) -> None:
    """Analyses of traces, each a function `(trace, *, options)`; `help` is its line in `stack profile --help`."""


@hookspec
def stack_register_panels(registry: Registrar) -> None:
    """Panels of a run's report, each a `Panel`; `order` is its place, the lowest first."""


@hookspec(firstresult=True)
def stack_select_op(call: Any, chip: Any, candidates: tuple[str, ...]) -> str | None:
    """Chooses among the implementations that support an `OpCall`, by name; None leaves it to the next plugin."""


HOOKS = tuple(name for name in tuple(globals()) if name.startswith("stack_"))
REGISTRY_KINDS = tuple(name.removeprefix("stack_register_") for name in HOOKS if name.startswith("stack_register_"))

DETAILS: Mapping[str, Mapping[str, type]] = {
    "chips": {"device_kinds": tuple},
    "op_definitions": {"function": str, "suite": str},
    "commands": {"help": str, "huge_pages": bool},
    "analyses": {"help": str},
    "panels": {"order": int},
}
"""The details that `registry.add` takes beside name and target, with their types, by registry."""
