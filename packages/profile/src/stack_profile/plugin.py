"""Registrations of stack-profile."""

from stack_core.abi.hookspecs import hookimpl
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Registrar

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_observers(registry: Registrar) -> None:
    registry.add("profile", "stack_profile.captures.observer:profile_observer", every_process=True)


@hookimpl
def stack_register_sections(registry: Registrar) -> None:
    registry.add("profile", "stack_profile.captures.observer:ProfileConfig")


@hookimpl
def stack_register_analyses(registry: Registrar) -> None:
    """Registers the analyses; each becomes a command `stack profile NAME` and a section of the report."""
    registry.add("overview", "stack_profile.analyses.overview:overview", help="Time the steps, and what they wait for.")
    registry.add("advice", "stack_profile.analyses.advice:advice", help="Show what takes avoidable time, and a remedy.")
    registry.add("ops", "stack_profile.analyses.ops:ops", help="Show where the devices' time went.")
    registry.add("idle", "stack_profile.analyses.idle:idle", help="Show why devices were idle between operations.")
    registry.add("timeline", "stack_profile.analyses.timeline:timeline", help="Show what ran when, in a step.")
    registry.add(
        "roofline", "stack_profile.analyses.roofline:roofline", help="Compare operations with the chip's peaks."
    )
    registry.add(
        "memory", "stack_profile.analyses.memory:memory", help="Show what makes the peak of a program's memory."
    )
    registry.add(
        "out_of_memory",
        "stack_profile.analyses.out_of_memory:out_of_memory",
        help="Show what filled the devices when an allocation failed.",
    )
    registry.add(
        "python_heap",
        "stack_profile.analyses.python_heap:python_heap",
        help="Show what Python allocated at the peak of the host's memory.",
    )
    registry.add(
        "graph", "stack_profile.analyses.graph:graph", help="Show what an instruction reads, and what reads it."
    )
    registry.add(
        "input_pipeline",
        "stack_profile.analyses.input_pipeline:input_pipeline",
        help="Show how long the program waits for its input.",
    )
    registry.add(
        "requests", "stack_profile.analyses.requests:requests", help="Show waits and rates of served requests."
    )
    registry.add("rollouts", "stack_profile.analyses.rollouts:rollouts", help="Show the episodes of post-training.")
    registry.add(
        "communication", "stack_profile.analyses.communication:communication", help="Show what devices send each other."
    )
    registry.add("hosts", "stack_profile.analyses.hosts:hosts", help="Show which host delays the others, and why.")
    registry.add("transfers", "stack_profile.analyses.transfers:transfers", help="Show what hosts send each other.")
    registry.add(
        "compile", "stack_profile.analyses.compile:compilations", help="Show what was compiled, and why again."
    )


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add("profile run", "stack_profile.commands.profile:run", help="Capture a script.", huge_pages=True)
    registry.add("profile attach", "stack_profile.commands.attach:attach", help="Capture processes that run.")
    registry.add("profile ring", "stack_profile.commands.ring:ring", help="List the captures of the continuous mode.")
    registry.add("profile export", "stack_profile.commands.profile:export", help="Write a trace for other tools.")
    registry.add("profile report", "stack_profile.commands.report:report", help="Write all analyses as an HTML file.")
    registry.add(
        "profile open", "stack_profile.commands.open_page:open_page", help="Show a run's captures in a browser."
    )
    registry.add("profile diff", "stack_profile.commands.diff:diff", help="Rank what changed between captures.")
    registry.add(
        "profile gate", "stack_profile.commands.gate:gate", help="Fail where a program became slower or larger."
    )
    registry.add("profile costs", "stack_profile.commands.costs:costs", help="Compile a function, and read its costs.")
    for entry in registries.analyses.entries():
        target = f"stack_profile.commands.analyses:analysis_{entry.name}"
        registry.add(f"profile {entry.name}", target, help=entry.details.get("help", ""))
