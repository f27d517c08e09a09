"""Builds traces byte by byte, for what a test wants to see in one and nothing else; and one real capture."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import pytest

import stack_profile
from stack_profile.traces.trace import load_trace


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
    compiled, params, x = training
    params = jax.block_until_ready(compiled(params, x))
    directory = tmp_path_factory.mktemp("capture")
    with stack_profile.capture(directory) as capture:
        for _ in range(4):
            params = compiled(params, x)
    capture.wait()
    return directory


@pytest.fixture(scope="session")
def trace(captured):
    return load_trace(captured)
