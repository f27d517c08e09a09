from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_data_sources(registry):
    registry.add("csv", "acme_csv.columns:CsvSource")
