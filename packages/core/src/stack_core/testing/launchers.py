"""Contract suite of launchers: the guarantees that drivers rely on."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from stack_core.abi.launchers import Launcher
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.formation import formed
from stack_core.runtime.hosts import Hosts

__all__ = ["check_launcher", "echo"]

_TURN_S = 0.1
_LIMIT_S = 60.0


def echo(text: str) -> str:
    """Returns the result that the suite expects from its workers."""
    return f"{text} from a process of its own"


def check_launcher(make: Callable[[ClusterConfig], Launcher], config: ClusterConfig, token: bytes) -> None:
    """Starts two agents, forks a worker on each, ends and restarts one agent, and releases both.

    Args:
      make: class of the launcher. If the launcher cannot start agents, they must already be on their way.
      config: cluster of two hosts on this machine.
      token: secret by which agents and driver authenticate each other.

    Raises:
      AssertionError: the launcher breaks a guarantee of `Launcher`.
    """
    launcher = make(config)
    assert isinstance(launcher, Launcher), f"{launcher!r} lacks a method of the protocol"
    hosts = Hosts(config, launcher, token, count=2, preload=("stack_core.testing.launchers",))
    try:
        hosts.start((0, 1))
        assert sorted(hosts.present) == [0, 1], "start is followed by the agents of all hosts"
        assert launcher.problem(0) is None, "an agent that is there has no problem"
        _check_workers(hosts, 1)
        _check_secrecy(hosts, token)
        pids = {number: host.pid for number, host in hosts.present.items()}
        assert len(set(pids.values())) == 2, "each host has an agent of its own"

        hosts.end(1)
        hosts.end(1)  # ending it twice is not an error
        _wait(lambda: not _is_alive(pids[1]), "end ends the agent")
        assert _is_alive(pids[0]), "end ends that agent alone"
        hosts.start((1,))
        assert hosts.present[1].pid != pids[1], "start after end gives another agent"
        _check_workers(hosts, 2)
        pids = {number: host.pid for number, host in hosts.present.items()}
    finally:
        hosts.close()
    _wait(lambda: not any(map(_is_alive, pids.values())), "agents that are let go exit")


def _check_workers(hosts: Hosts, number: int) -> None:
    formation = formed(number, "127.0.0.1:1", hosts.present, 2)
    order = {"formation": number, "count": 2, "coordinator": formation.coordinator}
    target = {"target": "stack_core.testing.launchers:echo", "arguments": {"text": "hello"}}
    for member in formation.members:
        hosts.tell(member.host, fork={**order, **target, "rank": member.rank})
    results: dict[int, str] = {}
    until_s = time.monotonic() + _LIMIT_S
    while len(results) < 2 and time.monotonic() < until_s:
        for said in hosts.poll(_TURN_S):
            facts = said.get("worker", {})
            if facts.get("formation") == number and facts.get("status") == "done":
                results[facts["rank"]] = facts["result"]
    assert results == dict.fromkeys(range(2), "hello from a process of its own"), results


def _check_secrecy(hosts: Hosts, token: bytes) -> None:
    secret = token.hex().encode()
    for host in hosts.present.values():
        for name in ("cmdline", "environ"):
            shown = Path(f"/proc/{host.pid}/{name}").read_bytes()
            assert secret not in shown, f"the token is in the {name} of an agent, where others may read it"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def _wait(condition: Callable[[], bool], label: str) -> None:
    until_s = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < until_s, label
        time.sleep(_TURN_S)
