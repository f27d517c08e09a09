"""The check that stack-serve adds to `stack doctor`: its environment variable."""

from collections.abc import Iterator, Mapping

from stack_core.abi.findings import Finding

__all__ = ["API_KEY_VARIABLE", "check_server"]

API_KEY_VARIABLE = "STACK_API_KEY"


def check_server(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Reports whether servers started from this environment require a key, without printing it."""
    if environ.get(API_KEY_VARIABLE):
        found = "is set: `stack serve` answers only requests with this key, unless --api-key or --api-key-file is given"
        yield Finding(API_KEY_VARIABLE, "note", found)
