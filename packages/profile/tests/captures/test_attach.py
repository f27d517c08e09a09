"""Processes that listen are found and captured by their user alone; whatever goes wrong is named."""

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

import stack_profile
from stack_core.abi.errors import ConfigError
from stack_core.cli import main
from stack_profile import CaptureError, load_trace
from stack_profile.captures import addresses
from stack_profile.captures.addresses import Address
from stack_profile.captures.attach import address_of, attach, attachable, find_processes

PROGRAM = """
import sys, time
import jax, jax.numpy as jnp
import stack_profile

step = jax.jit(lambda x: jnp.tanh(x @ x))
x = step(jnp.ones((64, 64)))
listener = stack_profile.listen()
print(listener.address.pid, flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    x = step(x).block_until_ready()
    time.sleep(0.002)  # leaves the processor to the test
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory, monkeypatch):
    """A runtime directory of the test's own."""
    folder = tmp_path_factory.mktemp("runtime")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def start():
    """Starts programs that listen and step for some seconds; they are gone when the test is."""
    running = []

    def start(duration_s, code=PROGRAM):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", code, str(duration_s)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        assert running[-1].stdout.readline().strip() == str(running[-1].pid)
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def listener():
    jnp.ones(3).block_until_ready()
    with stack_profile.listen() as listener:
        yield listener


def test_processes_are_captured_together_and_read_as_one_trace(tmp_path, capsys, start):
    run = tmp_path / "run"
    in_run = PROGRAM.replace("listen()", f"listen(run=__import__('pathlib').Path({str(run)!r}))")
    pids = [start(300).pid, start(300, in_run).pid]
    main(["profile", "attach", "--json"])
    assert sorted(each["pid"] for each in json.loads(capsys.readouterr().out)) == sorted(pids)
    with pytest.raises(SystemExit):
        main(["profile", "attach", str(tmp_path)])
    assert f"{pids[0]} (" in capsys.readouterr().err, "the message lists what listens"
    main(["profile", "attach", *map(str, pids), "--duration-s", "0.5", "--out", str(tmp_path / "out")])
    paths = capsys.readouterr().out.split()
    assert [path.endswith(f"_{pid}.xplane.pb") for path, pid in zip(paths, pids, strict=True)] == [True, True]
    trace = load_trace(tmp_path / "out")
    assert len(trace.devices) == 2 and not trace.problems
    assert all(len(trace.steps[ops.device]) >= 2 for ops in trace.devices)
    # The directory of a run stands for all of its processes.
    jnp.ones(3).block_until_ready()
    with stack_profile.listen(run=run):
        main(["profile", "attach", str(run), "--duration-s", "0.1", "--out", str(tmp_path / "of_run")])
    found = [load_trace(path).about["pid"] for path in map(Path, capsys.readouterr().out.split())]
    assert sorted(found) == sorted([os.getpid(), pids[1]])


SCRIPT = """
import sys, time
import jax, jax.numpy as jnp

step = jax.jit(lambda x: jnp.tanh(x @ x))
x, end = step(jnp.ones((64, 64))), time.monotonic() + 60
print("steps", flush=True)
while time.monotonic() < end and not __import__("pathlib").Path(sys.argv[1]).exists():
    x = step(x).block_until_ready()
sys.exit(7)
"""


def test_a_script_that_knows_nothing_of_it_listens(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "stack_core", "profile", "run", "--listen", "script.py", "end"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "steps\n"
        (result,) = attach([address_of(process.pid)], out=tmp_path, duration_s=0.3)
        (tmp_path / "end").touch()
    assert process.returncode == 7
    assert result.partial is None and load_trace(result.path).devices
    assert not (tmp_path / "profile").exists()


def test_a_server_is_found_by_its_address_and_a_run_by_its_directory(tmp_path, capsys):
    jnp.ones(3).block_until_ready()
    with socket.create_server(("127.0.0.1", 0)) as server, stack_profile.listen(run=tmp_path / "run") as run:
        port = server.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"http://localhost:{port}/v1"):
            assert [each.pid for each in find_processes(address)] == [os.getpid()]
        assert find_processes(str(tmp_path / "missing" / ".." / "run")) == [run.address]
        main(["profile", "attach", str(tmp_path / "run"), "--duration-s", "0.1", "--out", str(tmp_path / "out")])
        assert load_trace(capsys.readouterr().out.strip()).about["pid"] == os.getpid()
    for wrong in (f"127.0.0.1:{port}", f"other.host:{port}", "nobody"):
        with pytest.raises(CaptureError, match="the directory of a listening run"):
            find_processes(wrong)


def test_a_program_that_ends_leaves_what_was_captured_and_says_that_it_is_partial(tmp_path, start):
    process = start(1.0)
    (result,) = attach([address_of(process.pid)], out=tmp_path, duration_s=60.0)
    assert process.wait(timeout=60) == 0
    assert result.problem is None and "the process ended" in result.partial
    trace = load_trace(result.path)
    assert trace.devices and trace.problems == (f"{result.path.name} is partial: {result.partial}",)
    assert attachable() == [] and addresses.addresses() == {}


def test_a_process_that_is_killed_is_named_and_forgotten(tmp_path, start):
    process = start(60)
    address = address_of(process.pid)
    killer = threading.Timer(0.5, process.send_signal, [signal.SIGKILL])
    killer.start()
    (result,) = attach([address], out=tmp_path, duration_s=30.0)
    assert "ended while it was captured" in result.problem and result.path is None
    assert len(addresses.addresses()) == 1
    with pytest.raises(CaptureError, match=f"No process {process.pid} of yours listens; listening processes: none"):
        address_of(process.pid)
    assert addresses.addresses() == {}
    (result,) = attach([address], out=tmp_path)
    assert "Nothing listens on port" in result.problem


def test_only_the_user_can_read_the_token(listener, runtime):
    assert listener.path.stat().st_mode & 0o777 == 0o600
    assert listener.path.parent.stat().st_mode & 0o777 == 0o700
    assert len(listener.address.token) >= 32
    listener.path.parent.chmod(0o755)
    with pytest.raises(CaptureError, match="mode 700"):
        attachable()


def test_it_listens_on_the_loopback_interface_alone(listener):
    assert listener._server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("given", [None, "Bearer ", "Bearer wrong", "Bearer wr\xf6ng"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_without_the_token_nothing_is_answered(listener, method, given):
    connection = http.client.HTTPConnection("127.0.0.1", listener.address.port, timeout=10)
    connection.request(method, "/", headers={} if given is None else {"Authorization": given})
    assert connection.getresponse().status == 401


def test_a_wrong_token_is_named(tmp_path, capsys, listener):
    address = listener.address
    (result,) = attach([Address(1, address.port, "wrong")], out=tmp_path)
    assert "token" in result.problem
    with pytest.raises(SystemExit):
        main(["profile", "attach", "--port", str(address.port), "--token", "wrong"])
    assert "The process was not captured: The token is not" in capsys.readouterr().err


def test_port_and_token_take_the_place_of_a_process(tmp_path, capsys, listener):
    assert listener.address.token.isalnum()  # one that begins with "-" would be read as an option
    tokens = ["--port", str(listener.address.port), "--token", listener.address.token]
    main(["profile", "attach", *tokens, "--duration-s", "0.1", "--out", str(tmp_path), "--name", "mine"])
    assert "plugins/profile/mine/" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["profile", "attach", "--port", "1"])
    assert "go together" in capsys.readouterr().err


def test_a_port_in_use_is_named(listener):
    with pytest.raises(CaptureError, match=f"Cannot listen on port {listener.address.port} "):
        stack_profile.listen(port=listener.address.port)
    with pytest.raises(CaptureError, match="Cannot listen on port 70000"):
        stack_profile.listen(port=70000)


def test_a_capture_that_runs_there_is_named_and_goes_on(tmp_path, listener):
    with stack_profile.capture(tmp_path / "first") as first:
        (result,) = attach([listener.address], out=tmp_path / "second", duration_s=0.1)
    assert "Another capture is running" in result.problem
    assert load_trace(first.wait()).spaces


def test_an_output_that_cannot_be_written_is_named(tmp_path, listener):
    (tmp_path / "file").touch()
    (result,) = attach([listener.address], out=tmp_path / "file", duration_s=0.1)
    assert "cannot be made" in result.problem
    (again,) = attach([listener.address], out=tmp_path / "good", duration_s=0.1)
    assert again.path.is_file()


@pytest.mark.parametrize("wrong", [{"duration_s": -1.0}, {"duration_s": float("inf")}, {"name": "../x"}])
def test_a_request_that_makes_no_sense_is_refused(tmp_path, listener, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        attach([listener.address], out=tmp_path, **wrong)
    content = json.dumps({"out": str(tmp_path), "name": "x", "duration_s": 1.0, **wrong})
    for body in (content, "[]", "nonsense", ""):
        connection = http.client.HTTPConnection("127.0.0.1", listener.address.port, timeout=10)
        connection.request("POST", "/", body, {"Authorization": f"Bearer {listener.address.token}"})
        assert connection.getresponse().status == 400
    assert not list(tmp_path.iterdir())


def test_who_asks_and_goes_leaves_the_program_in_peace(tmp_path, capfd, listener):
    connection = http.client.HTTPConnection("127.0.0.1", listener.address.port, timeout=10)
    content = json.dumps({"out": str(tmp_path), "name": "x", "duration_s": 0.3})
    connection.request("POST", "/", content, {"Authorization": f"Bearer {listener.address.token}"})
    while not list(tmp_path.iterdir()):  # it has not begun
        time.sleep(0.01)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    listener.close()
    assert capfd.readouterr() == ("", "")
    assert load_trace(tmp_path).spaces


def test_a_process_without_a_device_has_nothing_to_capture(tmp_path, start):
    code = "import os, time, stack_profile; stack_profile.listen(); print(os.getpid(), flush=True); time.sleep(60)"
    (result,) = attach([address_of(start(60, code).pid)], out=tmp_path, duration_s=0.1)
    assert "no device of JAX yet" in result.problem


def test_what_listens_for_something_else_is_told_from_a_process(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_hang_up, args=(server,)).start()
        (result,) = attach([Address(1, server.getsockname()[1], "token")], out=tmp_path)
    assert "is none that listens for this" in result.problem


def test_closing_is_idempotent_and_removes_the_address():
    listener = stack_profile.listen()
    listener.close()
    listener.close()
    assert not listener.path.exists()


def _hang_up(server):
    server.accept()[0].close()
