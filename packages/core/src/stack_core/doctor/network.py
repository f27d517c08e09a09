"""The network address of this host, at which a cluster's processes connect. JAX does not authenticate them."""

import ipaddress
import socket
from collections.abc import Callable, Iterator

from stack_core.abi.findings import Finding

__all__ = ["check_network"]


def check_network(name: str | None = None, resolve: Callable[[str], str] = socket.gethostbyname) -> Iterator[Finding]:
    """Reports the address of the host's own name, at which the collectives of CPU processes listen.

    Args:
      name: host name; by default the name of this host.
      resolve: returns the address of a name; raises `OSError` if it cannot be resolved.
    """
    name = name or socket.gethostname()
    try:
        address = resolve(name)
    except OSError as error:
        yield Finding(
            "network",
            "note",
            f"this host's name, {name}, has no address ({error}), so JAX's CPU processes cannot connect to each other",
            f"Add a line for {name} to /etc/hosts to run with `--hosts`.",
        )
        return
    if ipaddress.ip_address(address).is_loopback:
        yield Finding("network", "ok", f"this host's name, {name}, resolves to {address}, which is local to this host")
        return
    yield Finding(
        "network",
        "note",
        f"this host's name, {name}, resolves to {address}; with `--hosts`, CPU collectives listen there, and JAX does "
        "not authenticate connections",
        "Run clusters only in a network that other machines cannot reach.",
    )
