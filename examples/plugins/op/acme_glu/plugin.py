from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_ops(registry):
    registry.add("gated_linear_unit/one_product", "acme_glu.one_product:IMPLEMENTATION")
