from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_environments(registry):
    registry.add("guess", "acme_guess.guess:GuessConfig")
