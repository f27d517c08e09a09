"""Every launcher passes the suite; what they cannot do they say."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from stack_core.abi.errors import ClusterError, ConfigError
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.hosts import Hosts
from stack_core.runtime.launchers.joined import JoinedLauncher
from stack_core.runtime.launchers.processes import ProcessesLauncher, _TailReader
from stack_core.runtime.launchers.ray import RayLauncher
from stack_core.testing.launchers import check_launcher

TOKEN = bytes(range(32))
SETTINGS = {"hosts": 2, "start_s": 120.0, "silence_s": 20.0, "orphan_s": 60.0}


@pytest.fixture
def marked(monkeypatch):
    """Ends the agents that a test leaves."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("STACK_TEST_MARK", mark)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    yield
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"STACK_TEST_MARK={mark}".encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            continue


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_processes(marked):
    check_launcher(ProcessesLauncher, ClusterConfig(**SETTINGS), TOKEN)


def test_an_agent_may_write_more_than_a_pipe_holds():
    program = "import sys; sys.stderr.write('x' * 10**6 + 'the end')"
    agent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    reader = _TailReader(agent.stderr)
    assert agent.wait(60) == 0
    assert reader.tail().endswith(b"the end") and len(reader.tail()) == 2000


class Joining(JoinedLauncher):
    """Joined hosts, whom the test starts as SLURM would."""

    def __init__(self, config):
        super().__init__(config)
        self.config, self.hosts = config, {}

    def start(self, host, invitation):
        command = [sys.executable, "-m", "stack_core", "cluster", "join", self.config.address]
        command += ["--token-file", self.config.token_file]
        self.hosts[host] = subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(host)})

    def end(self, host, pid):
        if host in self.hosts:
            self.hosts[host].kill()
            self.hosts[host].wait()

    def close(self):
        for process in self.hosts.values():
            process.wait(30)


@pytest.mark.slow
def test_joined(marked, tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN.hex())
    address = f"127.0.0.1:{free_port()}"
    check_launcher(Joining, ClusterConfig(**SETTINGS, address=address, token_file=str(token_file)), TOKEN)


@pytest.mark.slow
def test_ray(marked, monkeypatch):
    # Read when Ray is imported.
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "180")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    ray = pytest.importorskip("ray", reason="needs stack-core[ray]")
    port = free_port()
    # A raylet gives up when its own agents do not tell their ports in fifteen seconds; given ones it need not wait for.
    names = (
        "dashboard-agent-grpc-port",
        "dashboard-agent-listen-port",
        "metrics-export-port",
        "runtime-env-agent-port",
    )
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=4"]
    command += ["--include-dashboard=false", "--block", *(f"--{name}={free_port()}" for name in names)]
    cluster = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    try:
        wait_for(port, cluster)
        check_launcher(RayLauncher, ClusterConfig(**SETTINGS), TOKEN)
    finally:
        ray.shutdown()
        cluster.terminate()  # and what it has started
        cluster.wait(60)


def wait_for(port, process, limit_s=120.0):
    """Waits until somebody listens."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise AssertionError(f"nobody listens at {port}")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"Install stack-core\[ray\]"):
        RayLauncher(ClusterConfig(**SETTINGS))


def test_joined_hosts_need_an_address_and_a_token():
    with pytest.raises(ConfigError, match=r"cluster\.token_file and a cluster\.address with a port"):
        JoinedLauncher(ClusterConfig(**SETTINGS))


def test_a_port_in_use_is_named():
    port = free_port()
    config = ClusterConfig(**SETTINGS, address=f"127.0.0.1:{port}")
    hosts = Hosts(config, ProcessesLauncher(config), TOKEN, count=1)
    try:
        with pytest.raises(ConfigError, match=rf"cluster\.address 127\.0\.0\.1:{port}: .*in use"):
            Hosts(config, ProcessesLauncher(config), TOKEN, count=1)
    finally:
        hosts.close()
