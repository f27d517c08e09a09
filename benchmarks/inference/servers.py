"""The servers side by side: how each is installed, started with a model, and asked."""

import base64
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from peers.peer import find_python, find_uv, run_quietly

from inference.models import SIZES, Perceptron
from stack_serve import bundle

__all__ = ["CONTENDERS", "SERVERS", "Contender", "Places", "Server", "logits_of"]

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Places:
    """Where peers are installed, and where bundles are written."""

    environments: Path
    models: Path


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, started in a separate process group.

    Attributes:
      command: (places, model, port) -> how to start it; installs it and writes its model, if need be.
      packages: distributions whose versions stand beside the figures.
    """

    name: str
    command: Callable[[Places, Perceptron, int], list[str | Path]]
    packages: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A server and a way to ask it for one row.

    Attributes:
      content: (pixels) -> the body of a request, and its headers.
    """

    name: str
    server: str
    path: str
    content: Callable[[np.ndarray], tuple[bytes, Mapping[str, str]]]
    outputs: Callable[[bytes], np.ndarray]

    def request(self, model: Perceptron) -> dict[str, object]:
        """The request that the client sends."""
        content, headers = self.content(model.pixels())
        path = self.path.format(model=model.name)
        return {"path": path, "content": base64.b64encode(content).decode(), "headers": dict(headers)}


def logits_of(contender: Contender, body: str) -> np.ndarray:
    """The outputs in an answer that the client hands over."""
    return contender.outputs(base64.b64decode(body))


def _ours(places: Places, model: Perceptron, port: int) -> list[str | Path]:
    repository = places.models / "bundles" / model.name
    if not repository.exists():
        _export(repository / model.name, model)
    stack = Path(sys.executable).with_name("stack")
    return [stack, "serve", "--repository", repository, "--port", str(port)]


def _export(directory: Path, model: Perceptron) -> None:
    import jax

    def compute(weights: Sequence[jax.Array], pixels: jax.Array) -> dict[str, jax.Array]:
        *hidden, last = weights
        for weight in hidden:
            pixels = jax.nn.relu(pixels @ weight)
        return {"logits": pixels @ last}

    inputs = {"pixels": ("float32", ("batch", model.widths[0]))}
    function = bundle.Function(compute, inputs=inputs, sizes={"batch": SIZES})
    directory.parent.mkdir(parents=True, exist_ok=True)
    bundle.export(directory, {"predict": function}, model.weights(), licence="Apache-2.0")


def _peer(program: str, *packages: str) -> Callable[[Places, Perceptron, int], list[str | Path]]:
    def command(places: Places, model: Perceptron, port: int) -> list[str | Path]:
        folder = places.environments / Path(program).stem
        python, installed = folder / "bin" / "python", folder / "installed"
        jax = f"jax[cpu]=={version('jax')}"
        if not installed.exists() or installed.read_text() != jax:
            running = f"{sys.version_info.major}.{sys.version_info.minor}"
            run_quietly(find_uv(), "venv", "--clear", f"--python={find_python(running)}", folder)
            run_quietly(find_uv(), "pip", "install", f"--python={python}", jax, *packages)
            installed.write_text(jax)
        return [python, _HERE / program, model.name, str(port)]

    return command


def _of_protocol(pixels: np.ndarray) -> tuple[bytes, Mapping[str, str]]:
    tensor = {"name": "pixels", "datatype": "FP32", "shape": pixels.shape, "data": pixels.reshape(-1).tolist()}
    return json.dumps({"inputs": [tensor]}).encode(), _JSON


def _of_protocol_binary(pixels: np.ndarray) -> tuple[bytes, Mapping[str, str]]:
    parameters = {"binary_data_size": pixels.nbytes}
    tensor = {"name": "pixels", "datatype": "FP32", "shape": pixels.shape, "parameters": parameters}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + pixels.tobytes(), {"inference-header-content-length": str(len(head)), **_BINARY}


def _from_protocol(body: bytes) -> np.ndarray:
    return np.array(json.loads(body)["outputs"][0]["data"])


_JSON = {"content-type": "application/json"}
_BINARY = {"content-type": "application/octet-stream"}
_plain = lambda pixels: (json.dumps({"pixels": pixels.tolist()}).encode(), _JSON)
_from_plain = lambda body: np.array(json.loads(body)["logits"]).reshape(-1)
_from_binary = lambda body: np.frombuffer(body[-40:], np.float32)  # ten logits end the body

SERVERS = {
    server.name: server
    for server in (
        Server(name="stack", command=_ours, packages=("stack-core", "stack-serve", "jax", "uvicorn", "httptools")),
        Server(
            name="FastAPI",
            command=_peer("fastapi_jit.py", "fastapi>=0.120,<1", "uvicorn[standard]>=0.40,<1"),
            packages=("fastapi", "jax", "uvicorn", "uvloop", "httptools"),
        ),
        Server(
            name="LitServe",
            command=_peer("litserve_jit.py", "litserve>=0.2.17,<0.3"),
            packages=("litserve", "jax", "uvicorn", "uvloop", "httptools"),
        ),
    )
}
CONTENDERS = (
    Contender(
        name="stack, binary",
        server="stack",
        path="/v2/models/{model}/infer",
        content=_of_protocol_binary,
        outputs=_from_binary,
    ),
    Contender(
        name="stack, JSON",
        server="stack",
        path="/v2/models/{model}/infer",
        content=_of_protocol,
        outputs=_from_protocol,
    ),
    Contender(
        name="FastAPI, binary",
        server="FastAPI",
        path="/binary",
        content=lambda pixels: (pixels.tobytes(), _BINARY),
        outputs=_from_binary,
    ),
    Contender(name="FastAPI, JSON", server="FastAPI", path="/json", content=_plain, outputs=_from_plain),
    Contender(name="LitServe, JSON", server="LitServe", path="/predict", content=_plain, outputs=_from_plain),
)
