"""Builds traces byte by byte, for what a test wants to see in one and nothing else; and one real capture."""

import functools
import json
import lzma
import re
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import hlo

import stack_profile
from stack_profile.traces.trace import load_trace, trace_of
from stack_profile.traces.xplane import read_space


def varint(value: int) -> bytes:
    value %= 1 << 64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def message(*fields: tuple[int, int | float | str | bytes]) -> bytes:
    """The wire form of (number, value) pairs: integers, doubles, texts, bytes or messages."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        elif isinstance(value, float):
            out += varint(number << 3 | 1) + struct.pack("<d", value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


@dataclass
class PlaneBuilder:
    """A plane whose names are numbered as they occur."""

    name: str
    lines: list[bytes] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    shared: dict[str, bytes] = field(default_factory=dict)
    stats: list[bytes] = field(default_factory=list)

    def text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts) + 1)

    def stat(self, name: str, value: int | float | str | bytes) -> bytes:
        key = self.text(name)
        if isinstance(value, str):
            return message((1, key), (7, self.text(value)))
        number = {int: 4, float: 2, bytes: 6}[type(value)]
        return message((1, key), (number, value))

    def event(self, name: str, start: int, duration: int, **stats: int | float | str | bytes) -> bytes:
        """Times in microseconds."""
        key = self.events.setdefault(name, len(self.events) + 1)
        each = [(4, self.stat(stat, value)) for stat, value in stats.items()]
        return message((1, key), (2, start * 1_000_000), (3, duration * 1_000_000), *each)

    def line(self, name: str, *events: bytes, timestamp_ns: int = 1_000) -> None:
        self.lines.append(message((2, name), (3, timestamp_ns), *((4, event) for event in events)))

    def metadata(self, name: str, **stats: int | float | str | bytes) -> None:
        """Statistics that all events of a name share."""
        self.events.setdefault(name, len(self.events) + 1)
        self.shared[name] = b"".join(message((5, self.stat(stat, value))) for stat, value in stats.items())

    def build(self) -> bytes:
        events = [
            (4, message((1, key), (2, message((1, key), (2, name)) + self.shared.get(name, b""))))
            for name, key in self.events.items()
        ]
        texts = [(5, message((1, key), (2, message((1, key), (2, text))))) for text, key in self.texts.items()]
        stats = [(6, stat) for stat in self.stats]
        return message((2, self.name), *((3, line) for line in self.lines), *events, *texts, *stats)


def space(*planes: PlaneBuilder, host: str = "vm") -> bytes:
    return message(*((1, plane.build()) for plane in planes), (4, host))


def hlo_proto(compiled: jax.stages.Compiled) -> bytes:
    """What a trace would hold of a compiled function, without its buffers."""
    (module,) = compiled.runtime_executable().hlo_modules()
    return message((1, module.as_serialized_hlo_module_proto()))


class Build:
    """The builders, for tests: files of tests cannot import each other."""

    message = staticmethod(message)
    varint = staticmethod(varint)
    plane = PlaneBuilder
    space = staticmethod(space)
    hlo_proto = staticmethod(hlo_proto)

    def metadata_plane(self, programs: Sequence[tuple[str, int, bytes]]) -> PlaneBuilder:
        plane = PlaneBuilder("/host:metadata")
        for name, key, proto in programs:
            plane.metadata(f"{name}({key})", **{"Hlo Proto": proto, "program_id": key})
        return plane

    def steps(self, durations: Mapping[str, Sequence[int]], *, idle: int = 100, proto: bytes | None = None) -> bytes:
        """A trace of steps that run operations one after the other, by name the microseconds in each step.

        The last step is there twice, for an analysis may leave out the one that no other follows.
        """
        plane, start = PlaneBuilder("/host:CPU"), 0
        events = []
        steps = list(zip(*durations.values(), strict=True))
        for run, each in enumerate([*steps, steps[-1]]):
            for name, duration in zip(durations, each, strict=True):
                about = {"hlo_op": name, "hlo_module": "jit_step", "program_id": 7, "run_id": run}
                events.append(plane.event(name, start, int(duration), **about))
                start += int(duration)
            start += idle
        plane.line("worker", *events)
        programs = [("jit_step", 7, proto)] if proto else []
        return space(plane, self.metadata_plane(programs))


@pytest.fixture(scope="session")
def build() -> Build:
    return Build()


COLLECTIVES = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%scattered (p: f32[64,4]) -> f32[16,4] {
  %p = f32[64,4]{1,0} parameter(0)
  %reduced = f32[64,4]{1,0} all-reduce(%p), replica_groups=[2,4]<=[4,2]T(1,0), channel_id=3, use_global_device_ids=true, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %mine = f32[16,4]{1,0} dynamic-slice(%reduced, %zero, %zero), dynamic_slice_sizes={16,4}
}

ENTRY %main (x: f32[16,4]) -> f32[16,4] {
  %x = f32[16,4]{1,0} parameter(0)
  %all-gather-start.1 = (f32[16,4]{1,0}, f32[64,4]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, channel_id=1, use_global_device_ids=true
  %copy.5 = f32[16,4]{1,0} copy(%x)
  %all-gather-done.1 = f32[64,4]{1,0} all-gather-done(%all-gather-start.1)
  %all-reduce.2 = f32[16,4]{1,0} all-reduce(%copy.5), replica_groups={{0,1},{2,3},{4,5},{6,7}}, channel_id=2, use_global_device_ids=true, to_apply=%add
  ROOT %fusion.7 = f32[16,4]{1,0} fusion(%all-gather-done.1), kind=kCustom, calls=%scattered
}
"""  # noqa: E501 - a line of HLO is a line

# Name, start and duration in microseconds: start and end of the gather surround a copy, the others are alone.
TPU_EVENTS = (
    ("all-gather-start.1", 0, 1),
    ("copy.5", 1, 60),
    ("all-gather-done.1", 61, 9),
    ("all-reduce.2", 70, 20),
    ("fusion.7", 90, 10),
)


@pytest.fixture(scope="session")
def tpu_trace(build):
    """Two steps of two devices of eight, on which the second is late by 5 us to the reduction."""
    proto = build.message((1, hlo.hlo_module_from_text(COLLECTIVES).as_serialized_hlo_module_proto()))
    planes = [build.metadata_plane([("jit_step", 7, proto)])]
    for late in (0, 5):
        plane = build.plane(f"/device:TPU:{late}")
        for name, _, _ in TPU_EVENTS:
            plane.metadata(name, program_id=7)
        plane.line("XLA Modules", *(plane.event("jit_step(7)", at, 105) for at in (0, 200)))
        events = [
            (
                name,
                at + start + (late if name == "all-reduce.2" else 0),
                duration - (late if name == "all-reduce.2" else 0),
            )
            for at in (0, 200)
            for name, start, duration in TPU_EVENTS
        ]
        plane.line("XLA Ops", *(plane.event(*event) for event in events))
        planes.append(plane)
    about = {"device_kind": "TPU v5p", "devices": 8, "meshes": [{"fsdp": 4, "tensor": 2}]}
    return trace_of([read_space(build.space(*planes))], about=about)


_TRANSFER_US: Final = 20


def _device_groups(groups):
    """Two devices of each host, as replica groups."""
    devices = ([str(2 * host + device) for host in group for device in range(2)] for group in groups)
    return "{" + ",".join("{" + ",".join(each) + "}" for each in devices) + "}"


def _sums(first, second, hosts):
    """A program of a product, and of sums over two lists of groups of hosts."""
    return f"""HloModule jit_step, is_scheduled=true, num_partitions={2 * hosts}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {{
  %x = f32[64,64]{{1,0}} parameter(0)
  %dot.1 = f32[64,64]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(step)/dot" source_file="/home/me/model.py" source_line=12}}
  %all-reduce.2 = f32[64,64]{{1,0}} all-reduce(%dot.1), replica_groups={_device_groups(first)}, channel_id=1, use_global_device_ids=true, to_apply=%add
  ROOT %all-reduce.3 = f32[64,64]{{1,0}} all-reduce(%all-reduce.2), replica_groups={_device_groups(second)}, channel_id=2, use_global_device_ids=true, to_apply=%add
}}
"""  # noqa: E501 - a line of HLO is a line


def _formation(
    build,
    arrivals,
    *,
    clocks=(0, 0),
    begins=0,
    first=None,
    second=None,
    drift=0.0,
    regular=False,
    waits="",
    permutes=False,
):
    """A trace of hosts with two devices each, which sum over all hosts and then within each host in each run.

    Args:
      arrivals: microseconds from the beginning of a run until each host takes part, [runs, hosts].
      clocks: microseconds by which the clock of each host is ahead.
      begins: first run in the capture of the last host.
      first, second: other groups of hosts of both sums.
      drift: growth of the last clock's lead.
      regular: whether runs last equally long.
      waits: name of an event of the host that fills the times until it takes part, instead of a product.
      permutes: whether each host sends to the next one instead of the first sum.
    """
    rng, hosts = np.random.default_rng(1), len(clocks)
    sums = {
        "all-reduce.2": first or [tuple(range(hosts))],
        "all-reduce.3": second or [(host,) for host in range(hosts)],
    }
    text = _sums(*sums.values(), hosts)
    if permutes:
        pairs = ",".join(f"{{{device},{(device + 2) % (2 * hosts)}}}" for device in range(2 * hosts))
        text = re.sub(r"all-reduce\(%dot.*", f"collective-permute(%dot.1), source_target_pairs={{{pairs}}}", text)
    module = hlo.hlo_module_from_text(text)
    proto = build.message((1, module.as_serialized_hlo_module_proto()))
    planes = [build.plane("/host:CPU") for _ in range(hosts)]
    events, calls = [[] for _ in range(hosts)], [[] for _ in range(hosts)]

    def add(host, run, name, start, stop):
        ahead = clocks[host] + (drift * start if host == hosts - 1 else 0)
        about = {"hlo_op": name, "hlo_module": "jit_step", "program_id": 7 + host, "run_id": 1000 * (host + 1) + run}
        for device in range(2) if host < hosts - 1 or run >= begins else ():
            place = round(start + ahead), round(stop - start)
            events[host].append(planes[host].event(name, *place, device_ordinal=device, **about))

    begin = 1_000_000
    for run, offsets in enumerate(np.asarray(arrivals)):
        now = [begin + int(offset) for offset in offsets]
        for host in range(hosts):
            add(host, run, "dot.1", begin, min(begin + 10, now[host]) if waits else now[host])
            calls[host].append(planes[host].event("PjitFunction(step)", begin + clocks[host] - 20, 5))
            if waits:
                calls[host].append(planes[host].event(waits, begin + clocks[host] + 10, now[host] - begin - 10))
        for name, groups in sums.items():
            ends = {host: max(now[each] for each in group) + _TRANSFER_US for group in groups for host in group}
            for host, end in ends.items():
                stop = end + int(rng.integers(0, 4))
                add(host, run, name, now[host], stop)
                now[host] = stop + 300 * host
        begin += 20_000 if regular else 20_000 + int(rng.integers(0, 4_000))
    for plane, each, called in zip(planes, events, calls, strict=True):
        plane.line("worker", *each)
        plane.line("python", *called)
    spaces = [
        read_space(build.space(plane, build.metadata_plane([("jit_step", 7 + host, proto)]), host=f"host{host}"))
        for host, plane in enumerate(planes)
    ]
    abouts = [{"devices": 2 * hosts, "process": [host, hosts]} for host in range(hosts)]
    return trace_of(spaces, about=abouts[0], abouts=abouts)


@pytest.fixture(scope="session")
def formation(build):
    """Builds traces of several hosts."""
    return functools.partial(_formation, build)


LAYERS, BATCH, WIDTH = 10, 64, 128


class Block:
    def __call__(self, x, weights):
        up, down = weights
        with jax.named_scope("mlp"):
            return x + jnp.tanh(x @ up) @ down


def loss(params, x):
    block = jax.checkpoint(Block().__call__)
    x, _ = jax.lax.scan(lambda carry, weights: (block(carry, weights), None), x, params["blocks"])
    return jnp.mean((x @ params["head"]) ** 2)


def step(params, x):
    gradients = jax.grad(loss)(params, x)
    return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients)


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    blocks = (
        jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)) * 0.05,
        jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)) * 0.05,
    )
    params = {"blocks": blocks, "head": jax.random.normal(keys[2], (WIDTH, WIDTH))}
    return params, jax.random.normal(keys[3], (BATCH, WIDTH))


@pytest.fixture(scope="session")
def training():
    """The step as it is compiled, and its arguments."""
    params, x = arguments()
    return jax.jit(step, donate_argnums=0).lower(params, x).compile(), params, x


@pytest.fixture(scope="session")
def captured(training, tmp_path_factory):
    """The directory of a capture of four steps."""
    jax.clear_caches()  # a capture lists all loaded programs, and other tests have steps, too
    compiled, params, x = training
    params = jax.block_until_ready(compiled(params, x))
    directory = tmp_path_factory.mktemp("capture")
    with stack_profile.capture(directory, stacks_hz=0.0) as capture:
        for _ in range(4):
            params = compiled(params, x)
    capture.wait()
    return directory


@pytest.fixture(scope="session")
def trace(captured):
    return load_trace(captured)


H100: Final = Path(__file__).parent / "h100"


@pytest.fixture(scope="session")
def h100_space():
    """The planes of a trace of three training steps on an H100, cut by `h100/cut_trace.py`."""
    return read_space(lzma.decompress((H100 / "train.xplane.pb.xz").read_bytes()))


@pytest.fixture(scope="session")
def h100_train(h100_space):
    return trace_of([h100_space])


@pytest.fixture(scope="session")
def h100_decode():
    """Numbers of a trace of two decoded tokens, see `h100/read_decode.py`."""
    command = [sys.executable, str(H100 / "read_decode.py")]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
