from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_logits_processors(registry):
    registry.add("top_sigma", "acme_top_sigma.top_sigma:TOP_SIGMA")
