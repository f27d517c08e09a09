"""Bodies of inference requests and answers over HTTP: JSON, with the tensors' bytes behind it where they are binary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from stack_core.abi.errors import nearest
from stack_serve.http.slices import Each, Items, Members, json_pieces
from stack_serve.inference.service import InferenceResponse
from stack_serve.inference.tensors import datatype, from_bytes, from_values, to_values
from stack_serve.oip.errors import ProtocolError

__all__ = ["HEADER", "InferRequest", "parse", "write"]

HEADER = b"inference-header-content-length"
"""How many bytes of the body are JSON; the tensors follow."""

_SLICE = 2**13  # values that are written while other threads wait
_FIELDS = ("id", "inputs", "model_name", "model_version", "outputs", "parameters")  # kserve repeats the path's
_INPUT_FIELDS = ("name", "shape", "datatype", "parameters", "data")
_OUTPUT_FIELDS = ("name", "parameters")
_PARAMETERS = ("binary_data_output", "signature", "timeout")


@dataclass(frozen=True)
class InferRequest:
    """A parsed inference request.

    Attributes:
      outputs: requested outputs, each with a flag for binary data; None requests all, in the form of `binary`.
      timeout_s: time limit of the client in seconds.
    """

    id: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, bool] | None
    binary: bool
    signature: str | None
    timeout_s: float | None


def parse(body: bytes, json_bytes: int | None) -> InferRequest:
    """Reads a body; binary tensors are views of it.

    Args:
      json_bytes: value of the header `Inference-Header-Content-Length`; None if the whole body is JSON.

    Raises:
      ProtocolError: the body violates the protocol.
      InferenceError: a tensor's bytes or values do not fit its shape and datatype.
    """
    if json_bytes is not None and not 0 <= json_bytes <= len(body):
        raise ProtocolError(f"Inference-Header-Content-Length is {json_bytes}; the body has {len(body)} bytes.")
    try:
        value = orjson.loads(body if json_bytes is None else memoryview(body)[:json_bytes])
    except orjson.JSONDecodeError as error:
        raise ProtocolError(
            f"The body is not JSON: {error}. Binary tensors need Inference-Header-Content-Length."
        ) from error
    request = _mapping(value, "The request", _FIELDS)
    parameters = _mapping(request.get("parameters") or {}, "parameters", _PARAMETERS)
    binary = memoryview(body)[json_bytes if json_bytes is not None else len(body) :]
    inputs: dict[str, np.ndarray] = {}
    place = 0
    for given in _list(request, "inputs"):
        entry = _mapping(given, "An input", _INPUT_FIELDS)
        name, kind, shape = _text(entry, "name"), _text(entry, "datatype"), _list(entry, "shape")
        if name in inputs:
            raise ProtocolError(f"The input {name!r} is given twice.")
        size = _mapping(entry.get("parameters") or {}, f"{name!r}.parameters", ("binary_data_size",))
        # With both, it would be unclear which values count.
        if ("binary_data_size" in size) == ("data" in entry):
            raise ProtocolError(f"The input {name!r} needs either data or the parameter binary_data_size.")
        if "data" in entry:
            inputs[name] = from_values(name, kind, shape, entry["data"])
            continue
        size_bytes = size["binary_data_size"]
        if not isinstance(size_bytes, int) or not 0 <= size_bytes <= len(binary) - place:
            left = len(binary) - place
            raise ProtocolError(f"The input {name!r} has binary_data_size {size_bytes!r}; {left} bytes are left.")
        inputs[name] = from_bytes(name, kind, shape, binary[place : place + size_bytes])
        place += size_bytes
    if place != len(binary):
        raise ProtocolError(f"{len(binary) - place} bytes follow the last input. Give each its binary_data_size.")
    binary_output = parameters.get("binary_data_output", False) is True
    return InferRequest(
        id=_text(request, "id", default=""),
        inputs=inputs,
        outputs=_outputs(request, default=binary_output),
        binary=binary_output,
        signature=_text(parameters, "signature", default="") or None,
        timeout_s=_timeout_s(parameters),
    )


def write(request: InferRequest, response: InferenceResponse) -> tuple[bytes, int | None]:
    """The body of an answer, and how many bytes of it are JSON where tensors follow.

    Raises:
      ProtocolError: an output is wanted that the signature does not have.
    """
    wanted = request.outputs if request.outputs is not None else dict.fromkeys(response.outputs, request.binary)
    described: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for name, as_binary in wanted.items():
        if name not in response.outputs:
            known = ", ".join(response.outputs)
            raise ProtocolError(f"There is no output {name!r}.{nearest(name, response.outputs)} Outputs: {known}.")
        array = response.outputs[name]
        half = array.dtype.name in ("bfloat16", "float16") and not as_binary  # JSON cannot represent these numbers
        entry: dict[str, Any] = {
            "name": name,
            "datatype": "FP32" if half else datatype(array.dtype.name),
            "shape": array.shape,
        }
        if as_binary:
            binary.append(array.tobytes())
            entry["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            values = to_values(array)
            entry["data"] = Items(values[start : start + _SLICE] for start in range(0, values.size, _SLICE))
        described.append(Members(entry))
    answer: dict[str, Any] = {"model_name": response.key.model, "model_version": str(response.key.version)}
    if request.id:
        answer["id"] = request.id
    head = b"".join(json_pieces(Members({**answer, "outputs": Each(described)})))
    return (b"".join([head, *binary]), len(head)) if binary else (head, None)


def _outputs(request: Mapping[str, Any], *, default: bool) -> dict[str, bool] | None:
    if not request.get("outputs"):
        return None
    outputs: dict[str, bool] = {}
    for given in _list(request, "outputs"):
        entry = _mapping(given, "An output", _OUTPUT_FIELDS)
        name = _text(entry, "name")
        parameters = _mapping(entry.get("parameters") or {}, f"{name!r}.parameters", ("binary_data",))
        outputs[name] = parameters.get("binary_data", default) is True
    return outputs


def _timeout_s(parameters: Mapping[str, Any]) -> float | None:
    given = parameters.get("timeout", 0)
    if not isinstance(given, int) or given < 0:
        raise ProtocolError(f"The parameter timeout is {given!r}; it counts microseconds.")
    # 0 means no limit, as in Triton.
    return given / 1e6 or None


def _mapping(value: Any, label: str, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{label} is {str(value)[:100]!r}; an object with {', '.join(known)} was expected.")
    for key in value:
        if key not in known:
            raise ProtocolError(
                f"{label} has the unknown key {key[:100]!r}.{nearest(key, known)} Known: {', '.join(known)}."
            )
    return value


def _list(mapping: Mapping[str, Any], key: str) -> list[Any]:
    value = mapping.get(key)
    if not isinstance(value, list):
        raise ProtocolError(f"{key} is {str(value)[:100]!r}; a list was expected.")
    return value


def _text(mapping: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = mapping.get(key, default)
    if not isinstance(value, str):
        raise ProtocolError(f"{key} is {str(value)[:100]!r}; a text was expected.")
    return value
