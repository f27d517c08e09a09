"""Unmodified clients of the Open Inference Protocol; each runs in a separate process, because their messages clash."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from stack_serve import bundle

pytestmark = pytest.mark.clients("tritonclient", "kserve")

TRITON = """
import importlib, sys
import ml_dtypes
import numpy as np
kind, address, images, expected = sys.argv[1:]
t = importlib.import_module(f"tritonclient.{kind}")
client = t.InferenceServerClient(address)
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("digits", "1")
assert client.get_model_metadata("digits") and client.get_inference_statistics("digits")
assert client.get_model_config("digits")
assert client.get_model_repository_index()
x, probabilities = np.load(images), np.load(expected)
for binary in (True, False) if kind == "http" else (True,):
    tensor = t.InferInput("pixels", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x, **({"binary_data": binary} if kind == "http" else {}))
    wanted = t.InferRequestedOutput("probabilities", **({"binary_data": binary} if kind == "http" else {}))
    found = client.infer("digits", [tensor], outputs=[wanted], request_id="7").as_numpy("probabilities")
    np.testing.assert_allclose(found, probabilities, rtol=0, atol=1e-5)
half = t.InferInput("x", [2], "BF16")
half.set_data_from_numpy(np.array([1.5, -2.0], ml_dtypes.bfloat16))
np.testing.assert_array_equal(client.infer("double", [half]).as_numpy("output"), [3.0, -4.0])
try:
    client.infer("digits", [tensor], model_version="9")
except Exception as error:
    assert "Live versions: 1" in str(error)
else:
    raise AssertionError("an unknown version was served")
client.unload_model("digits")
assert not client.is_model_ready("digits")
client.load_model("digits")
assert client.is_model_ready("digits")
"""
KSERVE = """
import asyncio, sys
import numpy as np
import kserve
kind, address, images, expected = sys.argv[1:]
x, probabilities = np.load(images), np.load(expected)
tensor = kserve.InferInput("pixels", list(x.shape), "FP32")
tensor.set_data_from_numpy(x, binary_data=kind == "http")
request = kserve.InferRequest(model_name="digits", infer_inputs=[tensor])

async def ask():
    if kind == "http":
        base = f"http://{address}"
        client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2", timeout=60))
        assert await client.is_server_live(base) and await client.is_server_ready(base)
        assert await client.is_model_ready(base, "digits")
        return await client.infer(base, request, model_name="digits")
    client = kserve.InferenceGRPCClient(address)
    assert await client.is_server_ready() and await client.is_model_ready("digits")
    return await client.infer(request)

found = asyncio.run(ask()).outputs[0].as_numpy()
np.testing.assert_allclose(found, probabilities, rtol=0, atol=1e-5)
"""


def predict(params: np.ndarray, pixels: jax.Array) -> dict[str, jax.Array]:
    return {"probabilities": jax.nn.softmax(pixels @ params)}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Path]]:
    """The addresses of a server by protocol, and a folder with images and what they give in this process."""
    folder = tmp_path_factory.mktemp("clients")
    random = np.random.default_rng(0)
    params, x = random.normal(size=(64, 10)).astype("f4"), random.normal(size=(5, 64)).astype("f4")
    function = bundle.Function(predict, inputs={"pixels": ("float32", ("batch", 64))}, sizes={"batch": (1, 8)})
    bundle.export(folder / "models/digits/1", {"predict": function}, params, licence="MIT", name="digits")
    double = bundle.Function(lambda params, x: x + x, inputs={"x": ("bfloat16", ("batch",))}, sizes={"batch": (2,)})
    bundle.export(folder / "models/double", {"predict": double}, licence="MIT")
    np.save(folder / "images.npy", x)
    np.save(folder / "expected.npy", np.asarray(predict(params, x)["probabilities"]))
    command = [sys.executable, "-m", "stack_core", "serve", "--repository", str(folder / "models"), "--json"]
    arguments = [*command, "--port", "0", "--grpc-port", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            ready: dict[str, Any] = json.loads(server.stdout.readline())
            http = ready["address"].removeprefix("http://")
            yield {"http": http, "grpc": f"127.0.0.1:{ready['grpc_port']}"}, folder
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0


@pytest.mark.parametrize("kind", ["http", "grpc"])
@pytest.mark.parametrize("client", [TRITON, KSERVE], ids=["tritonclient", "kserve"])
def test_it_gets_what_this_process_computes(addresses: tuple[dict[str, str], Path], client: str, kind: str) -> None:
    by_kind, folder = addresses
    files = [str(folder / "images.npy"), str(folder / "expected.npy")]
    done = subprocess.run(
        [sys.executable, "-c", client, kind, by_kind[kind], *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
