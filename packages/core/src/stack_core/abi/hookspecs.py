"""The hooks of ABI 1, one for each registry that plugins fill. `docs/hooks.md` has a section with an example for each.

Every `stack_register_<things>(registry)` hook is called once, on first use of that registry, with a `Registrar`:
`registry.add(name, target, **details)`. A target is an object or, better, a "module:attribute" string: registering it
then imports nothing.
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
    """Registers chips by kind: each a `stack_core.chips.Chip`, or a function without arguments that measures one."""


@hookspec
def stack_register_ops(registry: Registrar) -> None:
    """Registers implementations of ops, each an `OpImplementation` named "op/implementation"."""


@hookspec
def stack_register_op_definitions(registry: Registrar) -> None:
    """Registers ops by name, each an `Op`.

    Details: `function`, the public function that models call; `suite`, the `OpSuite` of the op's contract tests.
    """


@hookspec
def stack_register_tuned_tables(registry: Registrar) -> None:
    """Registers tuned tables, each a `TunedTable`. If several tables know a call, the first by name decides."""


@hookspec
def stack_register_models(registry: Registrar) -> None:
    """Registers model families, each a `ModelFamily`."""


@hookspec
def stack_register_data_sources(registry: Registrar) -> None:
    """Registers data sources by the scheme of their address: functions from the rest of it to a `DataSource`."""


@hookspec
def stack_register_data(registry: Registrar) -> None:
    """Registers kinds of data by the name that `data.name` selects, each a `DataConfig`."""


@hookspec
def stack_register_optimizers(registry: Registrar) -> None:
    """Registers optimizers, each a config class whose `build(steps)` returns an Optax transformation."""


@hookspec
def stack_register_objectives(registry: Registrar) -> None:
    """Registers objectives, each a config class whose `build()` returns an `Objective`."""


@hookspec
def stack_register_model_formats(registry: Registrar) -> None:
    """Registers formats of models on disk by the scheme of their address, such as "hf", each a `ModelFormat`."""


@hookspec
def stack_register_engines(registry: Registrar) -> None:
    """Registers generation engines, each an `Engine` class constructed from a `GenerativeCheckpoint` and a config."""


@hookspec
def stack_register_logits_processors(registry: Registrar) -> None:
    """Registers logits processors, which requests select by name, each a `LogitsProcessor`."""


@hookspec
def stack_register_chat_servers(registry: Registrar) -> None:
    """Registers servers of chat APIs, each a `ChatServer` class."""


@hookspec
def stack_register_rewards(registry: Registrar) -> None:
    """Registers rewards by name, each a `Reward`: a function on the host that scores a completion."""


@hookspec
def stack_register_environments(registry: Registrar) -> None:
    """Registers RL environments by name, each an `EnvironmentKind`."""


@hookspec
def stack_register_tool_parsers(registry: Registrar) -> None:
    """Registers parsers of tool calls by the name of their format, each a `MessageParser` class."""


@hookspec
def stack_register_reasoning_parsers(registry: Registrar) -> None:
    """Registers parsers of reasoning by the name of their format, each a `MessageParser` class."""


@hookspec
def stack_register_launchers(registry: Registrar) -> None:
    """Registers launchers of agents, each a `Launcher` class constructed from a `ClusterConfig`."""


@hookspec
def stack_register_observers(registry: Registrar) -> None:
    """Registers observers: functions from an `ObserverContext` to an `Observer` or None."""


@hookspec
def stack_register_commands(registry: Registrar) -> None:
    """Registers subcommands of `stack`, each a function; the detail `help` is the line that `stack --help` shows."""


@hookspec
def stack_register_checks(registry: Registrar) -> None:
    """Registers checks of `stack doctor`, each a `Check`; `variables` names the STACK_ variables of a package."""


@hookspec
def stack_register_transforms(registry: Registrar) -> None:
    """Registers model transforms by config section: functions from `(config, sample_batch)` to a `ModelTransform`."""


@hookspec
def stack_register_methods(registry: Registrar) -> None:
    """Registers quantization methods by the name that `method` selects, each a class that docs/hooks.md describes."""


@hookspec
def stack_register_algorithms(registry: Registrar) -> None:
    """Registers algorithms for the codes of weights by the name in a rule's `algorithm`, each an `Algorithm`."""


@hookspec
def stack_register_sections(registry: Registrar) -> None:
    """Registers the config classes of the sections that a package adds to a run, by the section's name."""


@hookspec
def stack_register_analyses(registry: Registrar) -> None:
    """Registers trace analyses, each a function `(trace, *, options)`; `help` is its line in `stack profile --help`."""


@hookspec
def stack_register_panels(registry: Registrar) -> None:
    """Registers panels of a run's report, each a `Panel`; panels are sorted by the detail `order`, lowest first."""


@hookspec(firstresult=True)
def stack_select_op(call: Any, chip: Any, candidates: tuple[str, ...]) -> str | None:
    """Chooses among the implementations that support an `OpCall`, by name; None leaves it to the next plugin."""


HOOKS = tuple(name for name in tuple(globals()) if name.startswith("stack_"))
REGISTRY_KINDS = tuple(name.removeprefix("stack_register_") for name in HOOKS if name.startswith("stack_register_"))

DETAILS: Mapping[str, Mapping[str, type]] = {
    "chips": {"device_kinds": tuple},
    "op_definitions": {"function": str, "suite": str},
    "commands": {"help": str, "huge_pages": bool, "config": str, "parse": str, "function": str},
    "checks": {"variables": tuple},
    "analyses": {"help": str},
    "observers": {"every_process": bool},
    "panels": {"order": int},
}
"""The optional keyword details of `registry.add`, with their types, by registry."""
