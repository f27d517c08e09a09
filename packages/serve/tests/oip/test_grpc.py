from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from stack_serve.oip.messages import health_messages, messages

from ..bundle.digits import images, params, predict
from .conftest import Served


@pytest.fixture(scope="module")
def call(shared_grpc: Served) -> Iterator[Callable[..., Any]]:
    """Calls a method: `call("ModelInfer", field=...)`."""
    app = shared_grpc.http._app
    with grpc.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:  # pyrefly: ignore

        def make(method: str, *, timeout_s: float = 20.0, request: Any = None, **fields: Any) -> Any:
            send = channel.unary_unary(
                f"/inference.GRPCInferenceService/{method}",
                request_serializer=messages()[f"{method}Request"].SerializeToString,
                response_deserializer=messages()[f"{method}Response"].FromString,
            )
            return send(request or messages()[f"{method}Request"](**fields), timeout=timeout_s)

        make.channel = channel  # pyrefly: ignore
        yield make


def request(rows: np.ndarray, *, raw: bool = True, **fields: Any) -> Any:
    message = messages()["ModelInferRequest"](**{"model_name": "digits", "id": "7", **fields})
    tensor = message.inputs.add(name="pixels", datatype="FP32", shape=rows.shape)
    if raw:
        message.raw_input_contents.append(rows.tobytes())
    else:
        tensor.contents.fp32_contents.extend(rows.reshape(-1).tolist())
    return message


@pytest.mark.parametrize("raw", [True, False])
def test_inference_over_raw_and_typed_tensors(call: Callable[..., Any], raw: bool) -> None:
    x = images(11)
    answer = call("ModelInfer", request=request(x, raw=raw))
    assert (answer.model_name, answer.model_version, answer.id) == ("digits", "1", "7")
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("probabilities", "FP32", [11, 10])
    found = np.frombuffer(answer.raw_output_contents[0], "f4").reshape(11, 10)
    np.testing.assert_allclose(found, predict(params(), x)["probabilities"], rtol=1e-5, atol=1e-6)


def test_what_is_told_of_server_and_models(call: Callable[..., Any]) -> None:
    assert call("ServerLive").live and call("ServerReady").ready
    assert "statistics" in call("ServerMetadata").extensions
    assert call("ModelReady", name="digits").ready and call("ModelReady", name="digits", version="1").ready
    assert not call("ModelReady", name="other").ready and not call("ModelReady", name="digits", version="2").ready
    metadata = call("ModelMetadata", name="digits")
    assert [(each.name, each.datatype, list(each.shape)) for each in metadata.inputs] == [("pixels", "FP32", [-1, 64])]
    (known,) = call("RepositoryIndex").models
    assert (known.name, known.version, known.state) == ("digits", "1", "READY")
    call("ModelInfer", request=request(images(2)))
    (counted,) = call("ModelStatistics", name="digits").model_stats
    assert counted.inference_count >= 2 and counted.inference_stats.success.count >= 1


def test_every_method_that_is_advertised_is_answered(call: Any) -> None:
    config = call("ModelConfig", name="digits").config
    assert (config.name, config.max_batch_size, config.backend) == ("digits", 8, "stack")
    assert config.HasField("dynamic_batching")
    (pixels,) = config.input
    assert (pixels.name, pixels.data_type, list(pixels.dims)) == ("pixels", 11, [64])  # TYPE_FP32
    named = {name.removesuffix("Request") for name in messages() if name.endswith("Request")}
    for name in sorted(named - {"ModelInfer", "RepositoryModelUnload", "RepositoryModelLoad"}):
        given = {"name": "digits"} if name.startswith("Model") else {}
        call(name, **given)


def test_health_is_grpcs_own(call: Any) -> None:
    check = call.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_messages()["HealthCheckRequest"].SerializeToString,
        response_deserializer=health_messages()["HealthCheckResponse"].FromString,
    )
    assert check(health_messages()["HealthCheckRequest"](), timeout=20).status == 1


@pytest.mark.parametrize(
    ("message", "code", "told"),
    [
        (request(images(1)[:, 1:]), "INVALID_ARGUMENT", "Expected (pixels: float32[batch, 64])"),
        (request(images(1), model_name="digit"), "NOT_FOUND", "Did you mean 'digits'"),
        (request(images(1), model_version="4"), "NOT_FOUND", "Live versions: 1"),
        (request(images(1), model_version="x"), "NOT_FOUND", "is not a number"),
        (
            request(images(1), raw_input_contents=[b"more"]),
            "INVALID_ARGUMENT",
            "each input needs one, or none has one. Expected predict(pixels",
        ),
        (request(images(1), raw_input_contents=[bytes(255)]), "INVALID_ARGUMENT", "Expected predict(pixels"),
        (messages()["ModelInferRequest"](model_name="digits"), "INVALID_ARGUMENT", "'pixels' is missing"),
    ],
)
def test_bad_requests_have_a_status_and_say_what_was_expected(
    call: Callable[..., Any], message: Any, code: str, told: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call("ModelInfer", request=message)
    error: Any = caught.value
    assert error.code().name == code and told in error.details()


def test_bytes_that_are_no_message_are_refused(call: Any) -> None:
    send = call.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.RpcError) as caught:
        send(b"\xff\xff\xff", timeout=20)
    error: Any = caught.value
    assert error.code().name == "INVALID_ARGUMENT"


def test_a_model_is_unloaded_and_loaded(call: Callable[..., Any]) -> None:
    call("RepositoryModelUnload", model_name="digits")
    assert not call("ModelReady", name="digits").ready
    call("RepositoryModelLoad", model_name="digits")
    assert call("ModelReady", name="digits").ready
