"""The driver's socket: who is let in, who is refused and why, who only makes noise. The test plays the agents."""

import random
import socket
import threading

import pytest

from stack_core.abi.errors import ClusterError
from stack_core.abi.launchers import Invitation
from stack_core.runtime.channel import ChannelClosed, dial
from stack_core.runtime.config import ClusterConfig, parsed_address
from stack_core.runtime.hosts import Hosts
from stack_core.runtime.versions import installed

TOKEN = b"t" * 32


class Nobody:
    """A launcher whose agents the test plays."""

    def __init__(self):
        self.ended = []

    def start(self, host: int, invitation: Invitation) -> None:
        pass

    def end(self, host, pid):
        self.ended.append((host, pid))

    def problem(self, host):
        return None

    def close(self):
        pass


@pytest.fixture
def hosts():
    hosts = Hosts(ClusterConfig(hosts=2, start_s=1.0, silence_s=1.0), Nobody(), TOKEN, count=2)
    yield hosts
    hosts.close(exit_agents=False)
    for thread, links in _CAME:
        thread.join(10)
        for link in links:
            link.close()
    _CAME.clear()


_CAME = []


def greeting(**changes):
    facts = {**installed(), "problem": None, "preloaded": [], "workers": []}
    return {"role": "agent", "host": 0, "pid": 1, "name": "node7", "at": "127.0.0.1", **facts, **changes}


def come(hosts, hello, token=TOKEN):
    """An agent that says hello, in a thread, as dialing and accepting wait for each other."""
    links = []

    def run():
        try:
            link = dial(parsed_address(hosts.address), token)
        except ChannelClosed:
            return
        link.send({"hello": hello})
        links.append(link)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    _CAME.append((thread, links))
    return links


def refusal(hosts, **changes):
    come(hosts, greeting(**changes))
    with pytest.raises(ClusterError) as caught:
        hosts.wait_for((0,), 10.0)
    return str(caught.value)


def test_version_skew_names_the_host_the_package_and_both_versions(hosts):
    facts = installed()
    facts["versions"] = {**facts["versions"], "jax": "0.9.1"}
    here = installed()["versions"]["jax"]
    assert f"host 0 (node7) has jax 0.9.1, but the driver has {here}. Install jax {here}" in refusal(hosts, **facts)


def test_a_host_without_a_plugin_is_named_and_so_is_one_with_more(hosts):
    facts = installed()
    facts["plugins"] = {**facts["plugins"], "acme": "1.0"}
    said = facts["plugins"].pop("core")
    message = refusal(hosts, **facts)
    assert f"host 0 (node7) lacks the plugin 'core' ({said})" in message
    assert "host 0 (node7) has the plugin 'acme' (1.0), which the driver lacks" in message


def test_a_host_that_cannot_import_or_that_nobody_expects_is_named(hosts):
    assert "cannot run this: it cannot import stack_train" in refusal(hosts, problem="it cannot import stack_train")
    hosts.misfits.clear()
    assert "connected, but this cluster has 2 hosts" in refusal(hosts, host=5)


def test_hosts_that_do_not_come_are_named_with_the_strangers_that_did(hosts):
    come(hosts, greeting(), token=b"u" * 32)
    with pytest.raises(ClusterError, match=r"Hosts 0, 1 of 2 did not come to .* 1 connections were of no agent"):
        hosts.wait_for((0, 1), 1.0)


def test_a_silent_agent_is_lost_and_ended(hosts):
    come(hosts, greeting())
    hosts.wait_for((0,), 10.0)
    told = []
    while not any("lost" in said for said in told):
        told += hosts.poll(0.1)
    assert [said["lost"].startswith("silent for 1.") for said in told if "lost" in said] == [True]
    assert hosts._launcher.ended == [(0, 1)] and not hosts.present


def test_a_range_waits_for_the_rest_only_so_long_and_fails_without_enough(hosts):
    come(hosts, greeting())
    assert hosts.gather(lambda ready: ready >= 1, (0, 1), 0.2) == [1]
    assert hosts.ready == (0,)
    assert [message["host"] for message in hosts.poll(0.0) if "came" in message] == [0]
    assert hosts.launch_missing() == [1] and hosts.launch_missing() == []
    with pytest.raises(ClusterError, match=r"Hosts .*1 of 2 did not come to .* in 1 s"):
        hosts.gather(lambda ready: ready >= 2, (0, 1), 0.2)


def test_a_range_does_not_wait_for_agents_that_cannot_start(hosts):
    come(hosts, greeting())
    hosts.wait_for((0,), 10.0)
    hosts._launcher.problem = lambda host: "no disk" if host == 1 else None
    assert hosts.gather(lambda ready: ready >= 1, (0, 1), 60.0) == [1]
    with pytest.raises(ClusterError, match=r"Too many agents cannot start\.\nhost 1: no disk"):
        hosts.gather(lambda ready: ready >= 2, (0, 1), 60.0)


def test_a_host_that_cannot_import_is_refused_and_does_not_count(hosts):
    hosts._preload = ("table_engine",)
    links = come(hosts, greeting())
    while 0 not in hosts.present:
        hosts.poll(0.1)
    assert hosts.ready == ()
    _CAME[-1][0].join(10)
    links[0].send({"preloaded": "it cannot import table_engine"})
    told = []
    while not any("refused" in said for said in told):
        told += hosts.poll(0.1)
    assert "cannot run this: it cannot import table_engine" in told[-1]["refused"] and not hosts.present


def test_a_thousand_pieces_of_noise_at_the_socket_crash_nothing(hosts):
    generator = random.Random(1)
    address = parsed_address(hosts.address)
    for number in range(1000):
        with socket.create_connection(address, timeout=5) as connection:
            connection.sendall(generator.randbytes(generator.randint(0, 80)))
            if number % 8 == 0:
                hosts.poll(0.0)
    while hosts._greeting:
        hosts.poll(0.1)
    come(hosts, greeting())
    hosts.wait_for((0,), 10.0)
    assert sorted(hosts.present) == [0]


def test_an_agent_whose_frames_were_changed_is_lost_and_another_may_come(hosts):
    links = come(hosts, greeting())
    hosts.wait_for((0,), 10.0)
    _CAME[-1][0].join(10)
    links[0].peer.send({"event": "step"})
    links[0].peer.outgoing[-1] ^= 1
    links[0].flush()
    told = []
    while not any("lost" in said for said in told):
        told += hosts.poll(0.1)
    assert "differs from its MAC" in next(said["lost"] for said in told if "lost" in said)
    assert not any("event" in said for said in told)
    come(hosts, greeting(pid=2))
    hosts.wait_for((0,), 10.0)
    assert hosts.present[0].pid == 2


@pytest.mark.parametrize(
    "hello",
    [
        {},
        [],
        7,
        {"role": "agent"},
        greeting(pid="1"),
        greeting(workers=[3]),
        {"role": "worker", "rank": "x"},
        {"role": []},
    ],
)
def test_a_holder_of_the_token_that_says_no_greeting_is_dropped(hosts, hello):
    links = come(hosts, hello)
    while not hosts.strangers:
        hosts.poll(0.1)
    _CAME[-1][0].join(10)
    links[0].socket.settimeout(5)
    with pytest.raises(ChannelClosed):
        while True:
            links[0].read()
    assert not hosts.present and not hosts.arrivals
