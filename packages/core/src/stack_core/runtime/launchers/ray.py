"""Agents in actors of a Ray cluster, which provides the hosts; everything else works as with other launchers.

Ray manages nodes, placement, autoscaling and the environment of the processes. Actors are detached: agents survive a
killed driver, and each actor ends with its agent.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

from stack_core.abi.errors import ClusterError
from stack_core.abi.launchers import Invitation
from stack_core.runtime.agent import invitation_json
from stack_core.runtime.config import ClusterConfig

__all__ = ["AgentHolder", "RayLauncher"]

_NAMESPACE = "stack"


class AgentHolder:
    """An actor that owns an agent's process and ends with it."""

    def start(self, line: str) -> int:
        """Starts the agent with an invitation; returns its pid."""
        agent = subprocess.Popen([sys.executable, "-m", "stack_core.runtime.agent"], stdin=subprocess.PIPE, text=True)
        assert agent.stdin is not None, "it is a pipe"
        agent.stdin.write(line)
        agent.stdin.close()
        threading.Thread(target=lambda: os._exit(min(1, abs(agent.wait()))), daemon=True).start()
        return agent.pid


class RayLauncher:
    """A launcher that places one actor per host.

    It connects to the Ray cluster at RAY_ADDRESS, or to a cluster of this machine.
    """

    def __init__(self, config: ClusterConfig) -> None:
        try:
            import ray
        except ImportError as error:
            raise ClusterError(
                "The launcher ray needs Ray, which is not installed. Install stack-core[ray]."
            ) from error
        self._ray: Any = ray
        self._resources = dict(config.resources)
        self._started: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        # The user's program may have connected with its own options.
        if not ray.is_initialized():
            try:
                ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), namespace=_NAMESPACE, log_to_driver=False)
            except ConnectionError as error:
                raise ClusterError(
                    f"No Ray cluster is at {os.environ.get('RAY_ADDRESS', 'this machine')}: {error}. Start one by "
                    "`ray start --head`, or set RAY_ADDRESS; if the cluster has a token, set RAY_AUTH_MODE=token too."
                ) from error

    def start(self, host: int, invitation: Invitation) -> None:
        # The token identifies the cluster, but Ray shows the names of actors to everyone.
        digest = hashlib.sha256(invitation.token.encode()).hexdigest()[:12]
        self._names[host] = f"agent-{digest}-{host}"
        self.end(host, None)  # another driver may have started it
        further = {name: amount for name, amount in self._resources.items() if name not in ("CPU", "GPU")}
        actor = self._ray.remote(AgentHolder).options(
            name=self._names[host],
            namespace=_NAMESPACE,
            lifetime="detached",
            get_if_exists=False,
            max_restarts=0,
            num_cpus=self._resources.get("CPU", 0.5),
            num_gpus=self._resources.get("GPU", 0),
            resources=further or None,
            scheduling_strategy="SPREAD",
        )
        holder = actor.remote()
        self._started[host] = holder.start.remote(invitation_json(replace(invitation, follows_parent=True)))

    def end(self, host: int, pid: int | None) -> None:
        name = self._names.get(host)
        if name is None:
            return
        with contextlib.suppress(ValueError):  # it has ended
            self._ray.kill(self._ray.get_actor(name, namespace=_NAMESPACE), no_restart=True)
        self._started.pop(host, None)

    def problem(self, host: int) -> str | None:
        reference = self._started.get(host)
        if reference is None or not self._ray.wait([reference], timeout=0)[0]:
            return None
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return f"its actor failed: {str(error).strip().splitlines()[-1]}"
        return None

    def close(self) -> None:
        self._started.clear()
