"""Commands that run programs ask for large pages; the tests of what the system offers are the doctor's."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import command_names, entry
from stack_core.abi.registry import Entry, Registry
from stack_core.runtime import huge_pages

PROGRAM = """
import os, signal, sys
from stack_core.runtime import huge_pages
huge_pages.is_chosen = lambda environ: huge_pages.TUNABLE in environ.get("GLIBC_TUNABLES", "")
print("starts")
huge_pages.restart_with_huge_pages()
print(os.getpid(), os.environ["GLIBC_TUNABLES"], sys.argv[1:])
assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""

ENTRY = """
import os, sys
from stack_core import command_names, entry
from stack_core.runtime import huge_pages
huge_pages.is_chosen = lambda environ: False
command_names.uses_huge_pages = lambda name: name == "heavy"

def restart(*program):
    print("cyclopts" in sys.modules, flush=True)
    os._exit(3)

os.execve = restart
entry.main()
"""


@pytest.mark.parametrize("before", [None, "glibc.malloc.check=1", "glibc.malloc.hugetlb=0"])
def test_a_process_starts_anew_once_as_the_same_process(monkeypatch, before):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if before:
        monkeypatch.setenv("GLIBC_TUNABLES", before)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "-x", "a b"], stdout=subprocess.PIPE, text=True)
    lines = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 0
    expected = {
        None: "glibc.malloc.hugetlb=1",
        "glibc.malloc.check=1": "glibc.malloc.check=1:glibc.malloc.hugetlb=1",
        "glibc.malloc.hugetlb=0": "glibc.malloc.hugetlb=0",
    }
    assert lines[-1] == f"{process.pid} {expected[before]} ['-x', 'a b']"
    assert lines.count("starts") == (1 if before == "glibc.malloc.hugetlb=0" else 2)


def test_where_nothing_can_be_chosen_it_goes_on(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *program: started.append(program))
    monkeypatch.setattr(huge_pages, "is_chosen", lambda environ: None)
    huge_pages.restart_with_huge_pages()
    assert not started


@pytest.fixture
def restarts(monkeypatch):
    entries = {
        "heavy": Entry("heavy", lambda: None, "acme", {"huge_pages": True}),
        "light": Entry("light", lambda: None, "acme", {}),
    }
    counted = []
    monkeypatch.setattr(command_names.registries, "commands", Registry("commands", lambda: (entries, {})))
    monkeypatch.setattr(huge_pages, "restart_with_huge_pages", lambda: counted.append(1))
    return counted


@pytest.mark.parametrize(("arguments", "count"), [(["heavy"], 1), (["light"], 0), (["heavyy"], 0), ([], 0)])
def test_commands_that_say_so_restart(monkeypatch, restarts, arguments, count):
    monkeypatch.setattr(sys, "argv", ["stack", *arguments])
    entry._restart_with_huge_pages()
    assert len(restarts) == count


def test_a_command_restarts_before_the_parser_is_imported():
    command = [sys.executable, "-c", ENTRY, "heavy"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "False\n"), done.stderr


def test_arrays_lie_in_one_block_as_they_were():
    shapes_of = {"float32": (3, 5), "bfloat16": (7,), "int8": (2, 3, 5), "float8_e5m2": (9,), "bool": (4,), "int32": ()}
    arrays = {dtype: jnp.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 for dtype, shape in shapes_of.items()}
    tree = {dtype: array.astype(dtype) for dtype, array in arrays.items()} | {"int4": jnp.arange(8).astype(jnp.int4)}
    wanted = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in tree.values()]
    copied = dict(zip(tree, huge_pages.in_one_block(iter(tree.values()), wanted), strict=True))
    for name, array in tree.items():
        assert (copied[name].dtype, copied[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(np.asarray(copied[name], float), np.asarray(array, float))
    places = sorted(copied[name].unsafe_buffer_pointer() for name in shapes_of)
    assert np.diff(places).tolist() == [64] * (len(places) - 1)
    cast = huge_pages.in_one_block([np.float32([1.5, 2.5])], [jax.ShapeDtypeStruct((2,), jnp.bfloat16)])[0]
    assert cast.dtype == jnp.bfloat16 and cast.tolist() == [1.5, 2.5]
