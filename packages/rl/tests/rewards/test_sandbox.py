"""Attacks on the sandbox: each is stopped, or the sandbox does not start and says why."""

import asyncio
import os
import signal
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stack_core.abi.errors import SandboxError
from stack_rl.rewards import sandbox as module
from stack_rl.rewards.sandbox import Sandbox, SandboxConfig

LIMITS = {"wall_s": 4.0, "cpu_s": 1, "memory_bytes": 1 << 28, "file_bytes": 1 << 20, "output_bytes": 1 << 16}


@pytest.fixture(scope="module", params=["bubblewrap", "namespaces"])
def sandbox(request):
    try:
        return Sandbox(SandboxConfig(level=request.param, **LIMITS))
    except SandboxError as error:
        if request.param != "bubblewrap":
            raise
        pytest.skip(f"needs bubblewrap, and a Python that other users may read: {error}")


def test_a_program_reads_writes_and_ends_as_it_likes(sandbox):
    ended = sandbox.run("import sys; print(sys.stdin.read()[::-1]); sys.exit(3)", stdin=b"abc" * 20_000)
    assert (ended.status, ended.code, ended.succeeded) == ("exit", 3, False) and ended.output == b"cba" * 20_000 + b"\n"
    ended = sandbox.run("import os, json; print(os.getcwd(), os.getuid() != 0)")
    assert ended.succeeded and ended.output == b"/tmp True\n"
    assert sandbox.open == ()


def test_programs_of_any_size_and_letter_are_run(sandbox):
    """As an argument a program could have 128 KiB and no NUL, and the order was read byte by byte."""
    size = sandbox.run(f"x = '{'a' * 270_000}'\nprint(len(x))", stdin=b"x")
    assert (size.output, size.status) == (b"270000\n", "exit") and size.duration_s < LIMITS["wall_s"]
    for program in ("print(1)\0", "print('\ud800')"):
        ended = sandbox.run(program)
        assert (ended.status, ended.code) == ("exit", 1) and b"Error: " in ended.errors


ATTACKS = {
    "much memory": ("x = bytearray(2**40)", "exit", "MemoryError"),
    "memory bit by bit": ("x = []\nwhile True: x.append(bytearray(2**22))", "exit", "MemoryError"),
    "a large file": ("with open('x', 'wb') as f:\n while True: f.write(bytes(2**16))", "exit", "OSError"),
    "many files": ("for n in range(100): open(str(n), 'wb').write(bytes(2**18))", "exit", "No space left"),
    "threads": ("import threading\n[threading.Thread(target=print).start() for _ in range(5)]", "exit", "new thread"),
    "a fork": ("import os\nos.fork()", "exit", "BlockingIOError"),
    "a fork bomb": (
        "import os\nwhile True:\n try: os.fork()\n except OSError: raise SystemExit(os.write(2, b'refused'))",
        "exit",
        "refused",
    ),
    "raising limits": ("import resource as r\nr.setrlimit(r.RLIMIT_NPROC, (99, 99))", "exit", "not allowed to raise"),
    "becoming root": ("import os\nos.setuid(0)", "exit", "Error"),
    "no end of output": ("while True: print('x' * 10000)", "flood", ""),
    "no end of errors": ("import os\nwhile True: os.write(2, b'x' * 10000)", "flood", ""),
    "an endless loop": ("while True: pass", "killed or timeout", ""),  # by what comes first
    "writing elsewhere": ("open('/usr/x', 'w')", "exit", "Read-only"),
    "a mount": (
        "import ctypes\nif ctypes.CDLL(None).mount(b't', b'/tmp', b'tmpfs', 0, None) < 0: raise SystemExit('no mount')",
        "exit",
        "no mount",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_stopped(sandbox, attack):
    program, status, message = ATTACKS[attack]
    ended = sandbox.run(program)
    assert ended.status in status and not ended.succeeded, ended
    assert message in ended.errors.decode(), ended.errors
    assert len(ended.output) <= LIMITS["output_bytes"] and ended.duration_s < LIMITS["wall_s"] + 3


STAYS = """
import ctypes, os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ctypes.CDLL(None).prctl(1, 0)
try: os.setsid()
except OSError: pass
os.close(1); os.close(2)
time.sleep(1000)
"""


def test_a_program_that_sleeps_ignores_signals_and_leaves_its_session_is_ended():
    quick = Sandbox(SandboxConfig(**{**LIMITS, "wall_s": 2.0}))
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(quick.run, STAYS)
        program = begun(ending)
        ended = ending.result()
    assert ended.status == "timeout" and ended.duration_s < 5
    assert is_gone(program)


def test_a_runner_that_is_killed_takes_its_program_along_and_has_not_exited(sandbox):
    """kill -9 from outside, as when memory runs out: the program is gone, and its end is no answer of its own."""
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(sandbox.run, "import time\nprint(1, flush=True)\ntime.sleep(1000)")
        program = begun(ending)
        (runner,) = children({os.getpid()})
        os.kill(runner, signal.SIGKILL)
        ended = ending.result(timeout=LIMITS["wall_s"])
    assert (ended.status, ended.succeeded) == ("killed", False)
    assert is_gone(program)
    assert sandbox.run("print(2)").output == b"2\n"


def begun(ending):
    """Waits for a program that runs below this process."""
    while not ending.done():
        below = found = children({os.getpid()})
        while found:
            found = children(found)
            below |= found
        for each in below:
            if b"'<program>'" in read(Path(f"/proc/{each}/cmdline")):
                return each
        time.sleep(0.01)
    raise AssertionError(f"no program was seen before {ending.result()}")


def is_gone(process):
    until_s = time.monotonic() + 2
    while (is_there := b"'<program>'" in read(Path(f"/proc/{process}/cmdline"))) and time.monotonic() < until_s:
        time.sleep(0.01)
    return not is_there


def children(parents):
    """Processes that some others started and that still run."""
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        state, parent, *_ = read(path).rpartition(b") ")[2].split() or (b"Z", b"0")
        if int(parent) in parents and state != b"Z":
            found.add(int(path.parent.name))
    return found


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_network_and_files_of_the_machine_are_out_of_reach(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = sandbox.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)")
    assert "unreachable" in ended.errors.decode() or "refused" in ended.errors.decode()
    ended = sandbox.run("import os\nprint(os.path.exists('/proc/1/root'), sorted(os.listdir('/')))")
    assert ended.output.startswith(b"False") and b"home" not in ended.output
    assert not sandbox.run(f"open({str(Path(__file__))!r})").succeeded


def test_a_program_cannot_pass_for_the_launcher(sandbox):
    ended = sandbox.run("import os\nfor fd in range(3, 64):\n try: os.write(fd, b'refused: x')\n except OSError: pass")
    assert ended.succeeded
    ended = sandbox.run("import sys\nprint('refused: x', file=sys.stderr); sys.exit(1)")
    assert (ended.status, ended.code) == ("exit", 1)


def test_many_run_beside_each_other_on_an_event_loop(sandbox):
    async def all_of_them():
        return await asyncio.gather(*(sandbox.run_soon(f"print({number})") for number in range(4)))

    assert [each.output for each in asyncio.run(all_of_them())] == [b"0\n", b"1\n", b"2\n", b"3\n"]


def test_libraries_are_there_if_they_are_asked_for(sandbox):
    assert sandbox.run("import pydantic; print(pydantic.__name__)", libraries=True).output == b"pydantic\n"
    assert not sandbox.run("import pydantic").succeeded


def test_libraries_below_the_machines_tmp_are_not_hidden_by_the_sandbox_s_own(sandbox, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "mine.py").write_text("name = 'mine'")
        Path(folder).chmod(0o755)
        monkeypatch.setattr(module, "_libraries", lambda: [folder])
        ended = sandbox.run("import mine; print(mine.name); open('x', 'w').write('x')", libraries=True)
        assert ended.output == b"mine\n", ended.errors
        assert not sandbox.run(f"open({folder!r} + '/mine.py', 'a')", libraries=True).succeeded


def test_libraries_that_programs_cannot_read_are_named(sandbox, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_libraries", lambda: [str(tmp_path)])
    tmp_path.chmod(0o000)
    fresh = Sandbox(SandboxConfig(level=sandbox.level, **LIMITS))
    with pytest.raises(SandboxError, match=rf"cannot read the installed libraries: .*{tmp_path}"):
        fresh.run("import mine", libraries=True)


def test_what_cannot_be_closed_is_named_and_can_be_put_up_with(monkeypatch):
    monkeypatch.setattr(module, "_gaps", lambda settings, level: {"network": "the loopback can be reached"})
    with pytest.raises(SandboxError, match=r"(?s)session: network is open: the loopback .*sandbox.open: \[\.\.\.\]"):
        Sandbox(SandboxConfig(level="session"))
    assert Sandbox(SandboxConfig(level="session", open=("network",))).open == ("network",)


def test_a_level_that_does_not_work_says_why(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match="bubblewrap: bwrap is not installed"):
        Sandbox(SandboxConfig(level="bubblewrap"))
    monkeypatch.setattr(module, "_LAUNCHER", Path("/nowhere"))
    with pytest.raises(SandboxError, match=r"namespaces: a first program ended by exit 2: .*nowhere"):
        Sandbox(SandboxConfig(level="namespaces"))


def test_a_session_alone_leaves_gaps_or_cannot_begin():
    with pytest.raises(SandboxError) as caught:
        Sandbox(SandboxConfig(level="session"))
    message = str(caught.value)
    # Root's own Python may be out of reach for the user that programs run as.
    assert "network is open: the machine's loopback can be reached" in message or "Permission denied" in message
