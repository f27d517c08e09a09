from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_objectives(registry):
    registry.add("smoothed", "acme_smoothing.smoothed:Smoothed")
