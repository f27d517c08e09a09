"""How processes find each other, with sockets and threads in one process."""

import socket
import threading

import pytest

from stack_core.abi.errors import ConfigError, StackError, TrainingError
from stack_core.runtime.rendezvous import Place, ProcessesConfig, meet


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def place(address, process, count=2, timeout_s=20):
    return Place(process, count, address, timeout_s, 100)


def meeting(*places):
    """What came of each: None, or its error. A coordinator listens once they have met."""
    found = dict.fromkeys(places)

    def come(each):
        try:
            meet(each)
            if each.id == 0:
                server.append(socket.create_server(each.address))
        except StackError as error:
            found[each] = error

    server = []
    threads = [threading.Thread(target=come, args=(each,)) for each in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for each in server:
        each.close()
    return [found[each] for each in places]


def test_all_meet_whoever_comes_first(address):
    assert meeting(*(place(address, process, count=3) for process in (2, 0, 1))) == [None, None, None]


def test_a_first_process_that_does_not_come_is_an_error_that_names_the_address(address):
    with pytest.raises(TrainingError, match=rf"Process 1 waited 1 s for process 0 at processes.coordinator {address}"):
        meet(place(address, 1, timeout_s=1))


def test_others_that_do_not_come_are_named(address):
    with pytest.raises(TrainingError, match=r"waited 1 s at .* for 2 others; missing: 1, 2"):
        meet(place(address, 0, count=3, timeout_s=1))


def test_a_count_of_another_run_is_refused_on_both_sides(address):
    errors = meeting(place(address, 0), place(address, 1, count=3))
    for error in errors:
        assert isinstance(error, ConfigError) and "Process 1 of 3 connected to" in str(error)


def test_a_stranger_at_the_address_is_passed_over(address):
    first, second = (threading.Thread(target=meet, args=(place(address, process),)) for process in (0, 1))
    first.start()
    host, port = place(address, 0).address
    while True:
        try:
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            break
        except OSError:
            continue
    second.start()
    first.join(15)
    with socket.create_server((host, port)):  # the coordinator, for which the second process waits
        second.join(15)
    assert not first.is_alive() and not second.is_alive()


def test_an_address_in_use_is_refused(address):
    with socket.create_server(place(address, 0).address), pytest.raises(ConfigError, match="cannot listen at"):
        meet(place(address, 0))


SLURM = {"SLURM_PROCID": "3", "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[007-009,12]"}


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({}, {}, (0, 1, "")),
        ({}, SLURM, (0, 1, "")),
        ({"count": 2, "id": 1}, {}, (1, 2, "127.0.0.1:8476")),
        ({"count": 4}, SLURM, (3, 4, "node007:8553")),
        ({"count": 4}, SLURM | {"SLURM_STEP_NODELIST": "a,b"}, (3, 4, "a:8553")),
        ({"count": 4}, SLURM | {"SLURM_STEP_NODELIST": "solo"}, (3, 4, "solo:8553")),
        ({"count": 4, "coordinator": "h:1"}, SLURM, (3, 4, "h:1")),
        (
            {},
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "h:5"},
            (1, 2, "h:5"),
        ),
        ({"id": 0, "coordinator": "[::1]:9"}, {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, (0, 2, "[::1]:9")),
    ],
)
def test_settings_come_before_the_environment(settings, environ, expected):
    found = ProcessesConfig(**settings).resolved(environ)
    assert (found.id, found.count, found.coordinator) == expected


@pytest.mark.parametrize(
    ("settings", "environ", "said"),
    [
        ({"count": 2}, {}, "--processes.id 0 to 1"),
        ({"count": 2, "id": 2}, {}, "ids are 0 to 1"),
        ({"count": 2, "id": 1, "coordinator": "host"}, {}, "expected 'host:port'"),
        ({"count": 2}, {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID is 'one'"),
        ({"id": 1}, {"SLURM_PROCID": "1"}, "processes.id is 1, but the number of processes is not set"),
        ({"coordinator": "h:1"}, {}, "processes.coordinator is 'h:1', but the number"),
        ({"count": 1, "id": 1}, {}, "ids are 0 to 0"),
    ],
)
def test_settings_that_say_too_little_are_refused(settings, environ, said):
    with pytest.raises(ConfigError, match=said):
        ProcessesConfig(**settings).resolved(environ)
