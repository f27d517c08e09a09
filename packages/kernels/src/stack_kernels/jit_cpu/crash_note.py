"""Adds the name of the last entered machine-code kernel to Python's crash reports (`faulthandler`).

A kernel records its name with one store when it is called. Python's own report has only lines of Python, which do not
show what ran on XLA's threads.
"""

import ctypes
import faulthandler
import functools
import signal
from importlib import resources

import llvmlite.binding as llvm

__all__ = ["install", "last_kernel", "share_note"]

_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_ACTION_BYTES = 152
_FLAGS = 0x08000004  # SA_ONSTACK and SA_SIGINFO
_note = ctypes.c_char_p()


class _Action(ctypes.Structure):
    """struct sigaction of Linux's C libraries on x86-64."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


def last_kernel() -> str | None:
    """Returns the kernel that was entered last, on any thread."""
    return None if _note.value is None else _note.value.decode()


def share_note() -> None:
    """Gives the compiler the address at which kernels record their names."""
    llvm.add_symbol("stack_kernels_last_kernel", ctypes.addressof(_note))


@functools.cache
def install() -> llvm.ExecutionEngine | None:
    """Adds the note to crash reports if Python writes them, as in `python -X faulthandler` and the `stack` command."""
    if not faulthandler.is_enabled():
        return None
    source = resources.files("stack_kernels.jit_cpu").joinpath("crash_note.ll").read_text()
    target = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(source), target)
    engine.finalize_object()
    action = _Action(handler=engine.get_function_address("note"), flags=_FLAGS)
    earlier = engine.get_global_value_address("earlier")
    for number in _SIGNALS:
        ctypes.CDLL(None).sigaction(
            int(number), ctypes.byref(action), ctypes.c_void_p(earlier + _ACTION_BYTES * int(number))
        )
    return engine
