from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_models(registry):
    registry.add("bigram", "acme_bigram.bigram:FAMILY")
