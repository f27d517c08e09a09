"""Cores and memory, as a container of either cgroup version limits them."""

import os
import sys

import numpy as np
import pytest

from stack_core.chips import machine

MIB = 2**20


@pytest.fixture
def system(tmp_path):
    """Writes the files of a made-up system, by their paths, and returns its root."""

    def write(**files):
        for path, text in files.items():
            file = tmp_path / path.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return write


def test_this_machine_has_a_cpu_and_memory():
    assert machine.cpu_model()
    assert 1 <= machine.usable_cores() <= os.cpu_count()
    assert 0 < machine.available_memory_bytes() <= machine.memory_bytes()


def test_the_cpu_is_named_as_the_system_names_it(system):
    assert (
        machine.cpu_model(system(proc__cpuinfo="processor : 0\nmodel name\t: Fast CPU @ 9 GHz\n")) == "Fast CPU @ 9 GHz"
    )
    first = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    assert (
        machine.cpu_model(system(proc__cpuinfo=f"{first}\nprocessor : 1\n{first.replace('17', '18')}"))
        == "AMD EPYC (family 25, model 17)"
    )


def test_without_a_name_the_architecture_stands_in(tmp_path):
    assert machine.cpu_model(tmp_path) in (os.uname().machine, machine.platform.processor())


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"sys__fs__cgroup__cpu.max": "max 100000\n"}, None),
        ({"sys__fs__cgroup__cpu.max": "150000 100000\n"}, 1.5),
        ({"sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1\n", "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000"}, None),
        (
            {"sys__fs__cgroup__cpu__cpu.cfs_quota_us": "400000", "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000"},
            4.0,
        ),
    ],
)
def test_a_container_grants_so_many_cores(system, files, cores):
    assert machine.cpu_quota_cores(system(**files)) == cores


@pytest.mark.parametrize(
    "path", ["sys__fs__cgroup__memory.max", "sys__fs__cgroup__memory__memory.limit_in_bytes"], ids=["v2", "v1"]
)
def test_a_container_has_its_part_of_the_memory(system, path):
    assert machine.memory_bytes(system(**{path: f"{64 * MIB}\n"})) == 64 * MIB
    assert machine.memory_bytes(system(**{path: "max\n"})) == machine.memory_bytes()


def test_available_memory_is_that_of_the_machine_or_less_in_a_container(system):
    root = system(proc__meminfo="MemTotal: 9000 kB\nMemAvailable:    2048 kB\n")
    assert machine.available_memory_bytes(root) == 2 * MIB
    system(**{"sys__fs__cgroup__memory.max": f"{10 * MIB}", "sys__fs__cgroup__memory.current": f"{9 * MIB}"})
    assert machine.available_memory_bytes(root) == MIB
    system(**{"sys__fs__cgroup__memory.stat": f"anon 5\ninactive_file {MIB // 2}\n"})
    assert machine.available_memory_bytes(root) == MIB * 3 // 2


def test_a_system_that_does_not_tell_is_not_one_without_memory(tmp_path):
    assert machine.available_memory_bytes(tmp_path) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems keep the memory")
def test_zeros_take_no_memory_until_they_are_written():
    zeros = np.full(100_000_000, 0, np.uint8)
    full_bytes = machine.resident_bytes()
    machine.free_zeros(zeros.ctypes.data + 1, zeros.nbytes - 1)
    assert full_bytes - machine.resident_bytes() > 90_000_000
    zeros[50_000_000] = 1
    assert zeros.sum() == 1
    machine.free_zeros(zeros.ctypes.data + 50_000_000, 1)
    assert zeros[50_000_000] == 1  # less than a page


def test_memory_that_was_freed_goes_back(system):
    assert machine.resident_bytes(system()) is None
    blocks = [b"%05d" % number * 20_000 for number in range(1000)]  # glibc keeps those below 128 KiB
    full_bytes = machine.resident_bytes()
    last = blocks[-1]
    del blocks
    machine.give_memory_back()
    assert full_bytes - machine.resident_bytes() > 90_000_000 and len(last) == 100_000
