from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_optimizers(registry):
    registry.add("signs", "acme_signs.signs:Signs")
