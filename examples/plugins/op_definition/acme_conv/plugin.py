from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_op_definitions(registry):
    registry.add("short_conv", "acme_conv.op:OP", function="acme_conv.op:short_conv", suite="acme_conv.suite:SUITE")


@hookimpl
def stack_register_ops(registry):
    registry.add("short_conv/reference", "acme_conv.op:REFERENCE")
    registry.add("short_conv/grouped", "acme_conv.grouped:GROUPED")
