from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_engines(registry):
    registry.add("lookup", "acme_lookup.engine:Lookup")
