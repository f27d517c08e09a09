from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_ops(registry):
    registry.add("norm/acme_rows", "acme_rows.kernel:acme_rows")
