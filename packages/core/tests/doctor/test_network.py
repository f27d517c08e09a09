"""The doctor tells where collectives of CPUs listen, because anyone who reaches that address can join them."""

import pytest

from stack_core.doctor.network import check_network


@pytest.mark.parametrize(
    ("address", "status", "advice"),
    [("127.0.1.1", "ok", ""), ("10.1.2.3", "note", "Run clusters only in a network that other machines cannot reach.")],
)
def test_the_address_of_the_hosts_name_is_told(address, status, advice):
    (finding,) = check_network("here", lambda name: address)
    assert (finding.check, finding.status, finding.advice) == ("network", status, advice)
    assert finding.found.startswith(f"this host's name, here, resolves to {address}")


def test_a_name_without_an_address_is_told_with_the_remedy():
    def resolve(name):
        raise OSError("Name or service not known")

    (finding,) = check_network("nowhere", resolve)
    assert finding.status == "note"
    assert "/etc/hosts" in finding.advice
