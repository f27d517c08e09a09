from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_model_formats(registry):
    registry.add("table", "acme_table.table:FORMAT")
