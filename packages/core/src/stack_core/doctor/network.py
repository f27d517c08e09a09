"""Where the processes of a cluster reach each other on this host; JAX does not authenticate what connects there."""

import ipaddress
import socket
from collections.abc import Callable, Iterator

from stack_core.doctor.findings import Finding

__all__ = ["network_findings"]


def network_findings(
    name: str | None = None, resolve: Callable[[str], str] = socket.gethostbyname
) -> Iterator[Finding]:
    """Tells where the host's own name leads, at which the collectives of CPU processes listen.

    Args:
      name: the host's name; by default that of this host.
      resolve: the address of a name; raises `OSError` for one without.
    """
    name = name or socket.gethostname()
    try:
        address = resolve(name)
    except OSError as error:
        yield Finding(
            "network",
            "note",
            f"this host's name, {name}, has no address ({error}), and JAX's processes on CPUs cannot join each other",
            f"Add a line for {name} to /etc/hosts to run with `--hosts`.",
        )
        return
    if ipaddress.ip_address(address).is_loopback:
        yield Finding("network", "ok", f"this host's name, {name}, leads to {address}, which this host alone reaches")
        return
    yield Finding(
        "network",
        "note",
        f"this host's name, {name}, leads to {address}; with `--hosts`, collectives of CPUs listen there, and JAX does "
        "not authenticate them",
        "Run clusters in a network that only their hosts reach.",
    )
