import asyncio
import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_serve import bundle
from stack_serve.http.config import ServerConfig
from stack_serve.inference.config import InferenceConfig
from stack_serve.inference.service import Service
from stack_serve.oip.http import App

from ..bundle.digits import export, images, params, predict
from .conftest import Served

Serve = Callable[..., Served]


def tensor(array: np.ndarray, **changes: Any) -> dict[str, Any]:
    return {"name": "pixels", "datatype": "FP32", "shape": list(array.shape), "data": array.tolist(), **changes}


def expected(rows: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.asarray(predict(params(seed), rows)["probabilities"])


def test_json_in_and_out(shared: Served) -> None:
    x = images(3)
    answer = shared.infer({"id": "7", "inputs": [tensor(x)], "outputs": [{"name": "probabilities"}]})
    (output,) = answer.pop("outputs")
    assert answer == {"model_name": "digits", "model_version": "1", "id": "7"}
    assert (output["name"], output["datatype"], output["shape"]) == ("probabilities", "FP32", [3, 10])
    np.testing.assert_allclose(np.reshape(output["data"], (3, 10)), expected(x), atol=1e-5)


def test_binary_tensors_follow_the_json(shared: Served) -> None:
    x = images(2)
    head = {
        "inputs": [
            {"name": "pixels", "datatype": "FP32", "shape": [2, 64], "parameters": {"binary_data_size": x.nbytes}}
        ],
        "parameters": {"binary_data_output": True},
    }
    content = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(content))}
    answer = shared.client.post("/v2/models/digits/infer", content=content + x.tobytes(), headers=headers)
    size = int(answer.headers["inference-header-content-length"])
    (output,) = json.loads(answer.content[:size])["outputs"]
    assert output["parameters"] == {"binary_data_size": 2 * 10 * 4} and "data" not in output
    np.testing.assert_allclose(np.frombuffer(answer.content[size:], "f4").reshape(2, 10), expected(x), atol=1e-5)


def test_what_the_protocol_tells_of_server_and_models(serve: Serve) -> None:
    served = serve()
    get = lambda path: served.client.get(path).json()
    assert get("/v2/health/live") == {"live": True} and get("/v2/health/ready") == {"ready": True}
    assert "binary_tensor_data" in get("/v2")["extensions"]
    assert get("/v2/models/digits/ready") == {"name": "digits", "ready": True}
    metadata = get("/v2/models/digits/versions/1")
    assert metadata["inputs"] == [{"name": "pixels", "datatype": "FP32", "shape": [-1, 64]}]
    assert metadata["versions"] == ["1"] and metadata["properties"]["licence"] == "Apache-2.0"
    assert get("/v2/models/digits/config")["max_batch_size"] == 8
    served.infer({"inputs": [tensor(images(5))]})
    (counted,) = get("/v2/models/digits/stats")["model_stats"]
    assert (counted["inference_count"], counted["inference_stats"]["success"]["count"]) == (5, 1)
    text = served.client.get("/metrics").text
    assert 'stack_inference_rows_total{model="digits",version="1"} 5.0' in text
    assert 'stack_inference_responses_total{protocol="http",status="200"}' in text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": [tensor(images(1), datatype="FP64")]}, "dtype float64. Expected (pixels: float32[batch, 64])"),
        ({"inputs": [tensor(images(1), name="image")]}, "Expected (pixels: float32[batch, 64])"),
        ({"inputs": [tensor(images(1)[:, 1:])]}, "shape [1, 63]. Expected (pixels: float32[batch, 64])"),
        ({"inputs": [tensor(images(1), shape=[2, 64])]}, "needs 128. Expected predict(pixels: float32[batch, 64])"),
        ({"inputs": []}, "'pixels' is missing. Expected (pixels: float32[batch, 64])"),
        ({}, "inputs"),
        ({"inputs": [tensor(images(1))], "outputs": [{"name": "nothing"}]}, "Outputs: probabilities"),
        ({"inputs": [tensor(images(1))], "input": 1}, "unknown key 'input'"),
        ({"inputs": [tensor(images(1)), tensor(images(1))]}, "given twice"),
        ({"inputs": [tensor(images(1), parameters={"binary_data_size": 256})]}, "either data or"),
        ({"inputs": [{**tensor(images(1)), "shape": "many"}]}, "a list was expected"),
        ([1], "an object with"),
    ],
)
def test_bad_requests_are_answered_with_what_was_expected(shared: Served, body: Any, message: str) -> None:
    assert message in shared.infer(body, status=400)["error"]


def test_bodies_that_are_no_requests_are_refused(shared: Served) -> None:
    def post(content: bytes, status: int, **headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = shared.client.post("/v2/models/digits/infer", content=content, headers=named)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert (
            status != 400 or "number was expected" in error or "Expected predict(pixels: float32[batch, 64])" in error
        )
        return error

    head = json.dumps(
        {"inputs": [{"name": "pixels", "datatype": "FP32", "shape": [1, 64], "parameters": {"binary_data_size": 256}}]}
    ).encode()
    binary = {"inference_header_content_length": str(len(head))}
    assert "0 bytes are left" in post(head, 400, **binary)
    assert "255 bytes are left" in post(head + bytes(255), 400, **binary)
    assert "1 bytes follow the last input" in post(head + bytes(257), 400, **binary)
    assert "the body has" in post(head, 400, inference_header_content_length="9999")
    assert "a number was expected" in post(head, 400, inference_header_content_length="x")
    assert "is not JSON" in post(head + bytes(256), 400)
    assert "Compressed bodies" in post(head, 415, content_encoding="gzip")
    assert "the server takes" in post(bytes(2**22 + 1), 413)


def test_unknown_models_versions_signatures_and_paths_are_404(shared: Served) -> None:
    body = {"inputs": [tensor(images(1))]}
    assert "Did you mean 'digits'" in shared.infer(body, model="digit", status=404)["error"]
    assert (
        "Live versions: 1; 1 computes predict(pixels: float32[batch, 64])"
        in shared.infer(body, version="2", status=404)["error"]
    )
    assert "versions are numbers" in shared.infer(body, version="latest", status=404)["error"]
    named = {**body, "parameters": {"signature": "score"}}
    assert "It has: predict" in shared.infer(named, status=404)["error"]
    assert shared.client.get("/v2/models/digits/nothing").status_code == 404
    assert shared.client.get("/v1/models").status_code == 404


def test_a_new_version_replaces_the_old_one_and_a_damaged_one_does_not(serve: Serve) -> None:
    served = serve()
    x = images(4)
    ask = lambda: served.infer({"inputs": [tensor(x)]})
    export(served.repository / "digits" / "2", seed=2)
    served.wait_until(lambda: served.index() == {("digits", "1"): "UNAVAILABLE", ("digits", "2"): "READY"})
    answer = ask()
    assert answer["model_version"] == "2"
    np.testing.assert_allclose(np.reshape(answer["outputs"][0]["data"], (4, 10)), expected(x, seed=2), atol=1e-5)
    damaged = served.repository / "digits" / "3"
    shutil.copytree(served.repository / "digits" / "2", damaged.with_name("copy"))
    next(damaged.with_name("copy").glob("weights/*")).write_bytes(b"damaged")
    damaged.with_name("copy").rename(damaged)
    served.wait_until(lambda: served.index().get(("digits", "3")) == "UNAVAILABLE")
    reasons = [entry["reason"] for entry in served.client.post("/v2/repository/index").json()]
    assert any("the bundle is damaged" in reason for reason in reasons)
    assert ask()["model_version"] == "2"


def test_several_versions_are_live_and_clients_choose(serve: Serve) -> None:
    served = serve(live_versions=2)
    export(served.repository / "digits" / "2", seed=2)
    served.wait_until(lambda: served.index() == {("digits", "1"): "READY", ("digits", "2"): "READY"})
    x = images(1)
    for version, seed in (("1", 0), ("2", 2)):
        answer = served.infer({"inputs": [tensor(x)]}, version=version)
        assert answer["model_version"] == version
        np.testing.assert_allclose(answer["outputs"][0]["data"], expected(x, seed=seed)[0], atol=1e-5)


def test_clients_unload_and_load(serve: Serve) -> None:
    served = serve(poll_s=0)
    change = lambda what, model="digits": served.client.post(f"/v2/repository/models/{model}/{what}")
    assert change("unload").status_code == 200
    assert served.index() == {("digits", "1"): "UNAVAILABLE"}
    assert "is not served" in served.infer({"inputs": [tensor(images(1))]}, status=404)["error"]
    assert change("load").status_code == 200
    served.infer({"inputs": [tensor(images(1))]})
    assert change("load", "other").status_code == 404


def test_other_models_come_beside(serve: Serve) -> None:
    def lookup(params: Any, index: jax.Array) -> jax.Array:
        return params[index]

    served = serve()
    function = bundle.Function(lookup, inputs={"index": ("int32", ("batch",))}, sizes={"batch": (1, 4)})
    table = jnp.arange(6).astype(jnp.bfloat16) / 2
    bundle.export(served.repository / "table", {"predict": function}, table, licence="MIT")
    served.wait_until(lambda: served.index().get(("table", "1")) == "READY")
    index = {"name": "index", "datatype": "INT32", "shape": [2], "data": [5, 1]}
    (output,) = served.infer({"inputs": [index]}, model="table")["outputs"]
    assert (output["datatype"], output["data"]) == ("FP32", [2.5, 0.5])
    served.infer({"inputs": [tensor(images(1))]})


def test_keys_guard_all_but_health_and_metrics(serve: Serve) -> None:
    served = serve(keys=("secret",))
    assert served.client.get("/v2/health/ready").status_code == 200
    assert served.client.get("/v2/models/digits").status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert served.client.get("/v2/models/digits", headers=headers).status_code == 200


def test_full_queues_and_deadlines_are_told(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(max_waiting=4)
    (lane,) = served.service.lanes.values()
    began, free = threading.Event(), threading.Event()
    whole = dict(lane._programs)

    def stuck(key: Any) -> Callable[..., Any]:
        def call(*arrays: Any) -> Any:
            began.set()
            free.wait(30)
            return whole[key](*arrays)

        return call

    monkeypatch.setattr(lane, "_programs", {key: stuck(key) for key in whole})
    body = {"inputs": [tensor(images(3))]}
    statuses: list[int] = []

    def ask(**parameters: Any) -> threading.Thread:
        def run() -> None:
            answer = served.client.post("/v2/models/digits/infer", json={**body, "parameters": parameters})
            statuses.append(answer.status_code)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    first = ask()
    assert began.wait(30)
    second = ask(timeout=1)  # microseconds
    # At least the second request's rows: the lane may have left rows of the first for another call.
    served.wait_until(lambda: lane.waiting_rows >= 3)
    refused = served.client.post("/v2/models/digits/infer", json=body)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    free.set()
    first.join(30)
    second.join(30)
    assert sorted(statuses) == [200, 504]


def test_json_is_bounded_and_binary_tensors_are_not(serve: Serve) -> None:
    served = serve(max_json_bytes=1000)
    refused = served.infer({"inputs": [tensor(images(2))]}, status=413)["error"]
    assert "the server takes 1000 bytes of JSON (send large tensors as binary)" in refused
    x = images(64)
    described = {"name": "pixels", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
    for padding, status in ((0, 200), (1000, 413)):
        head = json.dumps({"inputs": [described], "id": "x" * padding}).encode()
        answer = served.client.post(
            "/v2/models/digits/infer",
            content=head + x.tobytes(),
            headers={"Inference-Header-Content-Length": str(len(head))},
        )
        assert answer.status_code == status


def test_large_answers_in_json_are_whole(shared: Served) -> None:
    x = images(9000)
    described = {"name": "pixels", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [described]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = shared.client.post("/v2/models/digits/infer", content=head + x.tobytes(), headers=headers)
    assert len(answer.content) > 2**18 and int(answer.headers["content-length"]) == len(answer.content)
    (output,) = answer.json()["outputs"]
    assert output["shape"] == [9000, 10]
    np.testing.assert_allclose(np.reshape(output["data"], (9000, 10)), expected(x), atol=1e-5)


def test_a_client_that_takes_nothing_is_cut_off(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve(stall_timeout_s=0.2)
    host, _, port = served.address.partition(":")
    ask = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 10_000
    connections = served.http._uvicorn.server_state.connections
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        with contextlib.suppress(OSError):  # it is cut off while it sends
            connection.sendall(ask)
        served.wait_until(lambda: not connections)
    assert caplog.text == ""


@pytest.mark.parametrize("parts", [[], [b"{"]])
def test_a_body_that_does_not_arrive_ends_its_request(parts: list[bytes], tmp_path: Path) -> None:
    app = App(Service(tmp_path, InferenceConfig()), ServerConfig(receive_timeout_s=0.01))
    path = "/v2/repository/index"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
    left = iter(parts)
    sent: list[Any] = []

    async def receive() -> Any:
        for part in left:
            return {"type": "http.request", "body": part, "more_body": True}
        return await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
    start, body = sent
    assert start["status"] == 408 and (b"connection", b"close") in start["headers"]
    assert b"did not arrive within 0.01 s" in body["body"]
