from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_observers(registry):
    registry.add("journal", "acme_journal.journal:journal")
