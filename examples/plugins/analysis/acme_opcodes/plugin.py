from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_analyses(registry):
    registry.add("opcodes", "acme_opcodes.opcodes:opcodes", help="Show the devices' time by the kind of instruction.")
