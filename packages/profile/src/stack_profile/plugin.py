"""What stack-profile registers."""

from stack_core.hookspecs import hookimpl
from stack_core.registry import Registrar

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_observers(registry: Registrar) -> None:
    registry.add("profile", "stack_profile.observer:profile_observer")


@hookimpl
def stack_register_configs(registry: Registrar) -> None:
    registry.add("profile", "stack_profile.observer:ProfileConfig")


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add(
        "profile", "stack_profile.commands.profile:profile", help="Profile a program, down to the Python line."
    )
