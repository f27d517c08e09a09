from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_data(registry):
    registry.add("bytes", "acme_bytes.windows:ByteData")
