import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
from jax import ffi
from llvmlite import ir

from stack_core.abi.errors import HardwareError
from stack_kernels.jit_cpu import host, xla_ffi
from stack_kernels.jit_cpu.builder import INDEX, POINTER, TILE, Builder
from stack_kernels.jit_cpu.xla_ffi import VERSION, ask_version, check_handler, interface_refusal

_HEADER = Path(ffi.include_dir()) / "xla/ffi/api/c_api.h"
# What `xla_call.ll` and `code.py` take for granted.
_OFFSETS = {
    "Buffer": {"data": 24, "dims": 40},
    "CallFrame": {"extension_start": 8, "api": 16, "ctx": 24, "args.args": 72, "rets.rets": 112},
    "Api": {
        "api_version.major_version": 32,
        "XLA_FFI_Error_Create": 48,
        "XLA_FFI_Error_Destroy": 64,
        "XLA_FFI_ThreadPool_Schedule": 136,
        "XLA_FFI_ThreadPool_NumThreads": 144,
    },
    "Metadata": {"api_version.major_version": 24, "api_version.minor_version": 28, "traits": 32},
    "Error_Create_Args": {"message": 16, "errc": 24},
    "Error_Destroy_Args": {"error": 16},
    "ThreadPool_Schedule_Args": {"ctx": 16, "task": 24, "data": 32},
    "ThreadPool_NumThreads_Args": {"ctx": 16, "num_threads": 24},
}


def test_structs_of_this_jaxlib_are_laid_out_as_the_handler_reads_them() -> None:
    header = re.sub(r"//[^\n]*", "", _HEADER.read_text())
    for name, expected in _OFFSETS.items():
        found, _ = _offsets(header, f"XLA_FFI_{name}")
        assert {field: found.get(field) for field in expected} == expected, name
    extensions = [struct for struct in ("Extension_Base", "InternalExtension") if f"XLA_FFI_{struct} {{" in header]
    found, _ = _offsets(header, f"XLA_FFI_{extensions[0]}")
    assert (found["type"], found["next"]) == (8, 16)
    assert re.search(r"XLA_FFI_\w*Extension_Metadata = 1\b", header)
    assert re.search(r"XLA_FFI_Error_Code_RESOURCE_EXHAUSTED = 8\b", header)


_FIELD = re.compile(r"(?:const |struct )?(?P<kind>\w+?)(?P<pointer>\s*\*+\s*|\s+|\()(?P<name>\w+)\)?", re.DOTALL)


def _offsets(header: str, struct: str) -> tuple[dict[str, int], int]:
    """The place of every field of a C struct, of those within its fields too, and its size."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}}", header, re.DOTALL)
    assert body is not None, struct
    found: dict[str, int] = {}
    place = 0
    for declaration in filter(None, (part.strip() for part in body[1].split(";"))):
        field = _FIELD.fullmatch(declaration)
        assert field is not None, declaration
        inner: dict[str, int] = {}
        if field["pointer"].strip() or field["kind"] in ("size_t", "int64_t"):  # "(" too: a function of the API
            size = 8
        elif f"struct {field['kind']} {{" in header:
            inner, size = _offsets(header, field["kind"])
        else:
            size = 4
        place = -(-place // min(size, 8)) * min(size, 8)
        found |= {field["name"]: place, **{f"{field['name']}.{name}": place + at for name, at in inner.items()}}
        place += size
    return found, -(-place // 8) * 8


def test_a_handler_declares_the_version_that_it_is_written_for(handler: int) -> None:
    assert interface_refusal() == ""
    assert ask_version(handler) == VERSION
    check_handler(handler)


def test_a_handler_of_another_version_is_not_registered(handler: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_ffi, "VERSION", (0, 9))
    with pytest.raises(HardwareError, match=r"declares version \(0, 3\).*STACK_CPU_KERNELS=xla"):
        check_handler(handler)


def test_an_older_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_ffi, "VERSION", (0, 999))
    assert "0.999, and jaxlib has 0." in interface_refusal.__wrapped__()


def test_an_extension_of_an_unknown_type_is_passed_over_and_the_kernel_runs(handler: int) -> None:
    result = ctypes.c_int64()
    buffer = (ctypes.c_int64 * 6)(48, 0, 0, ctypes.addressof(result))
    buffers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    payload = (ctypes.c_int64 * 8)()
    extension = (ctypes.c_int64 * 4)(32, 99, 0, ctypes.addressof(payload))
    frame = (ctypes.c_int64 * 20)()
    frame[1], frame[9], frame[14] = ctypes.addressof(extension), 0, ctypes.addressof(buffers)
    assert ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(handler)(ctypes.addressof(frame)) is None
    assert result.value == 7
    assert not any(payload)


@pytest.fixture(scope="module")
def handler() -> int:
    """That of a kernel without tiles, which writes a number when it ends."""
    processor = host.this_processor()
    if processor is None:
        pytest.skip("kernels are not written for this processor")
    module = ir.Module("test_handler")
    Builder(module, "tiles", [POINTER, POINTER], INDEX).close(INDEX(0))
    Builder(module, "tile", TILE).close()
    builder = Builder(module, "finish", [POINTER, POINTER])
    builder.store(INDEX(7), builder.buffer(builder.parameters[1], 0, 0)[0])
    builder.close()
    engine = _ENGINES.setdefault("handler", host.compiled(module, processor))
    return engine.get_function_address("handler")


_ENGINES: dict[str, Any] = {}  # which own the code
