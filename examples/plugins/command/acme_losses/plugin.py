from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_commands(registry):
    registry.add("losses", "acme_losses.command:losses", help="Draw the losses of a run.")
