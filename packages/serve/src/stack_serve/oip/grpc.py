"""The protocol over gRPC, with Triton's repository extension and gRPC's own health protocol."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import grpc
import numpy as np

from stack_core.abi.errors import ConfigError, nearest
from stack_core.runtime.http import NO_KEY, KeyCheck
from stack_serve.http.config import ServerConfig
from stack_serve.inference.repository import Key, latest
from stack_serve.inference.service import InferenceResponse, Service
from stack_serve.inference.tensors import datatype, from_bytes, from_values
from stack_serve.oip import statistics
from stack_serve.oip.errors import ProtocolError, expecting, http_status, message_of
from stack_serve.oip.messages import health_messages, messages
from stack_serve.oip.wire import joined, split

__all__ = ["GrpcServer"]

_LOG = logging.getLogger(__name__)
_SERVICE = "inference.GRPCInferenceService"
_HEALTH = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING = 1, 2
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# FP16 and BF16 lack a field in the protocol and need raw contents.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


@runtime_checkable
class Context(Protocol):
    """The part of a gRPC call's context that methods use; grpc's objects are not instances of its declared class."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...
    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...
    def time_remaining(self) -> float | None: ...


Method = Callable[[Any, Context], Awaitable[Any]]


class GrpcServer:
    """gRPC server on a separate port, on the event loop of the HTTP server."""

    def __init__(self, service: Service, config: ServerConfig, port: int) -> None:
        self._service = service
        self._config = config
        self._has_key = KeyCheck(config.api_keys) if config.api_keys else None
        self._port = port
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listens; returns the port.

        Raises:
          ConfigError: the port is in use.
        """
        most = self._config.max_body_bytes
        lengths = [("grpc.max_receive_message_length", most), ("grpc.max_send_message_length", -1)]
        # With SO_REUSEPORT, gRPC's default, a second server would start on the port and get some of the requests.
        self._server = grpc.aio.server(options=[*lengths, ("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self._methods(), self._health()))
        # gRPC reads IPv6 addresses only in brackets.
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        try:
            port = self._server.add_insecure_port(f"{host}:{self._port}")
        # grpc raises this class for an address in use.
        except RuntimeError as error:
            message = f"Cannot listen on {host}, port {self._port} for gRPC. Choose another --grpc-port."
            raise ConfigError(message) from error
        await self._server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        """Takes no more requests, and lets running ones end."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _methods(self) -> grpc.GenericRpcHandler:
        methods: Mapping[str, Method] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(method),
                request_deserializer=messages()[f"{name}Request"].FromString,
                response_serializer=messages()[f"{name}Response"].SerializeToString,
            )
            for name, method in methods.items()
        }
        # Bytes in and out: tensors stay where they lie.
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._guarded(self._infer))
        return grpc.method_handlers_generic_handler(_SERVICE, handlers)

    def _health(self) -> grpc.GenericRpcHandler:
        async def check(request: Any, context: Context) -> Any:
            status = _SERVING if self._service.state == "ready" else _NOT_SERVING
            return health_messages()["HealthCheckResponse"](status=status)

        behaviour: Any = check
        handler = grpc.unary_unary_rpc_method_handler(
            behaviour,
            request_deserializer=health_messages()["HealthCheckRequest"].FromString,
            response_serializer=health_messages()["HealthCheckResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(_HEALTH, {"Check": handler})

    def _guarded(self, method: Method) -> Any:  # handlers differ between grpc's two APIs
        """Wraps a method: checks the API key, and converts errors to statuses."""

        async def answer(request: Any, context: Context) -> Any:
            if not self._lets_in(context):
                # `abort` raises, so nothing after it runs.
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, NO_KEY)
            try:
                response = await method(request, context)
            except Exception as error:  # Any error fails this request only.
                status = http_status(error)
                if status == 500:
                    _LOG.exception("A request over gRPC failed")
                self._service.metrics.responses.labels("grpc", str(status)).inc()
                await context.abort(_CODES.get(status, grpc.StatusCode.INTERNAL), message_of(error))
            self._service.metrics.responses.labels("grpc", "200").inc()
            return response

        return answer

    def _lets_in(self, context: Context) -> bool:
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        return self._has_key is None or self._has_key({b"authorization": str(given).encode()})

    async def _infer(self, content: bytes, context: Context) -> bytes:
        rest, raw = split(content)
        try:
            request = messages()["ModelInferRequest"].FromString(rest)
        except Exception as error:  # DecodeError lacks a public base class
            raise ProtocolError("The request is no ModelInferRequest.") from error
        named = request.parameters.get("signature") if "signature" in request.parameters else None
        number = _number(request.model_version)
        _, lane = self._service.lane(request.model_name, number)
        with expecting(lane.manifest):
            inputs = _inputs(request, raw)
        response = await self._service.infer(
            request.model_name,
            inputs,
            version=number,
            signature=None if named is None else named.string_param,
            timeout_s=context.time_remaining(),
        )
        return _answer(request, response)

    async def _live(self, request: Any, context: Context) -> Any:
        return messages()["ServerLiveResponse"](live=True)

    async def _ready(self, request: Any, context: Context) -> Any:
        return messages()["ServerReadyResponse"](ready=self._service.state == "ready")

    async def _server_metadata(self, request: Any, context: Context) -> Any:
        return messages()["ServerMetadataResponse"](**statistics.server_metadata())

    async def _model_ready(self, request: Any, context: Context) -> Any:
        number, newest = _number(request.version), latest(self._service.versions, request.name)
        live = newest is not None and Key(request.name, number or newest) in self._service.lanes
        return messages()["ModelReadyResponse"](ready=live)

    async def _model_metadata(self, request: Any, context: Context) -> Any:
        key, lane = self._service.lane(request.name, _number(request.version))
        described = statistics.model_metadata(self._service, key, lane.manifest)
        return messages()["ModelMetadataResponse"](**described)

    async def _model_config(self, request: Any, context: Context) -> Any:
        key, lane = self._service.lane(request.name, _number(request.version))
        config = statistics.model_config(key, lane.manifest)
        for tensor in (*config["input"], *config["output"]):
            # JSON has the names of the enum, gRPC its numbers.
            tensor["data_type"] = statistics.TRITON_DTYPES.index(tensor["data_type"])
        return messages()["ModelConfigResponse"](config=config)

    async def _statistics(self, request: Any, context: Context) -> Any:
        counted = statistics.model_statistics(self._service, request.name, _number(request.version))
        return messages()["ModelStatisticsResponse"](**counted)

    async def _index(self, request: Any, context: Context) -> Any:
        return messages()["RepositoryIndexResponse"](models=statistics.index(self._service, ready=request.ready))

    async def _load(self, request: Any, context: Context) -> Any:
        await self._service.load(request.model_name)
        return messages()["RepositoryModelLoadResponse"]()

    async def _unload(self, request: Any, context: Context) -> Any:
        await self._service.unload(request.model_name)
        return messages()["RepositoryModelUnloadResponse"]()


def _inputs(request: Any, raw: Sequence[memoryview]) -> Mapping[str, np.ndarray]:
    if raw and len(raw) != len(request.inputs):
        counts = f"There are {len(request.inputs)} inputs and {len(raw)} raw_input_contents"
        raise ProtocolError(f"{counts}; each input needs one, or none has one.")
    inputs: dict[str, np.ndarray] = {}
    for number, tensor in enumerate(request.inputs):
        name, kind, shape = tensor.name, tensor.datatype, list(tensor.shape)
        if name in inputs:
            raise ProtocolError(f"The input {name!r} is given twice.")
        if raw:
            inputs[name] = from_bytes(name, kind, shape, raw[number])
        elif kind in _CONTENTS:
            inputs[name] = from_values(name, kind, shape, list(getattr(tensor.contents, _CONTENTS[kind])))
        else:
            raise ProtocolError(f"The input {name!r} is {kind}, which needs raw_input_contents.")
    return inputs


def _answer(request: Any, result: InferenceResponse) -> bytes:
    response = messages()["ModelInferResponse"](
        model_name=result.key.model, model_version=str(result.key.version), id=request.id
    )
    raw: list[bytes] = []
    for name in [output.name for output in request.outputs] or result.outputs:
        if name not in result.outputs:
            known = ", ".join(result.outputs)
            raise ProtocolError(f"There is no output {name!r}.{nearest(name, result.outputs)} Outputs: {known}.")
        array = result.outputs[name]
        response.outputs.add(name=name, datatype=datatype(array.dtype.name), shape=array.shape)
        raw.append(array.tobytes())
    return joined(response.SerializeToString(), raw)


def _number(version: str) -> int | None:
    if version and not (version.isascii() and version.isdigit()):
        raise ProtocolError(f"The version {version[:100]!r} is not a number.", status=404)
    return int(version) if version else None
