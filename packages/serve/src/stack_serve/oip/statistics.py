"""Metadata, configuration and statistics of models, and the index of the repository."""

from importlib.metadata import version
from typing import Any

from stack_serve.bundle.manifest import BATCH, Manifest, Signature, TensorSpec
from stack_serve.inference.lane import Lane
from stack_serve.inference.repository import Key
from stack_serve.inference.service import Service
from stack_serve.inference.tensors import datatype

__all__ = [
    "EXTENSIONS",
    "TRITON_DTYPES",
    "index",
    "model_config",
    "model_metadata",
    "model_statistics",
    "server_metadata",
]

EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
_TRITON_NAMES = "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"
TRITON_DTYPES = tuple(f"TYPE_{name}" for name in _TRITON_NAMES.split())
"""Triton's names of dtypes, by their number in its `model_config.proto`."""


def server_metadata() -> dict[str, Any]:
    """Returns the server's metadata."""
    return {"name": "stack", "version": version("stack-serve"), "extensions": list(EXTENSIONS)}


def model_metadata(service: Service, key: Key, manifest: Manifest) -> dict[str, Any]:
    """Of a model: its default signature's tensors, -1 for named axes; all signatures as text in `properties`."""
    signature = _default_signature(manifest)
    return {
        "name": key.model,
        "versions": [str(known.version) for known in sorted(service.lanes) if known.model == key.model],
        "platform": "stack_bundle",
        "inputs": [_tensor(spec) for spec in signature.inputs],
        "outputs": [_tensor(spec) for spec in signature.outputs],
        "properties": {name: str(each) for name, each in manifest.signatures.items()} | {"licence": manifest.licence},
    }


def model_config(key: Key, manifest: Manifest) -> dict[str, Any]:
    """Returns the fields of Triton's model configuration that its clients read."""
    signature = _default_signature(manifest)
    joins = signature.joins
    return {
        "name": key.model,
        "platform": "stack_bundle",
        "backend": "stack",
        "max_batch_size": signature.sizes[BATCH][-1] if joins else 0,
        "input": [_triton(spec, joins) for spec in signature.inputs],
        "output": [_triton(spec, joins) for spec in signature.outputs],
        **({"dynamic_batching": {}} if joins else {}),
    }


def model_statistics(service: Service, model: str = "", version: int | None = None) -> dict[str, Any]:
    """Returns the statistics of lanes in Triton's format; durations are nanoseconds.

    Args:
      model: name of a model; "" selects all.
      version: version of the model; None selects all live versions.

    Raises:
      UnknownName: no such model or version is live.
    """
    if model:
        service.lane(model, version)
    keys = [key for key in service.lanes if model in ("", key.model) and version in (None, key.version)]
    return {"model_stats": [_statistics(key, service.lanes[key]) for key in sorted(keys)]}


def index(service: Service, *, ready: bool = False) -> list[dict[str, str]]:
    """The repository's versions and their states."""
    entries: list[dict[str, str]] = []
    for key in sorted({*service.found, *service.versions}):
        known = service.versions.get(key)
        state, reason = (known.state, known.reason) if known is not None else ("UNAVAILABLE", "unloaded")
        state = "READY" if known is not None and known.live else state
        entries.append({"name": key.model, "version": str(key.version), "state": state, "reason": reason})
    return [entry for entry in entries if not ready or entry["state"] == "READY"]


def _default_signature(manifest: Manifest) -> Signature:
    name = manifest.default_signature
    return manifest.signatures[name if name in manifest.signatures else next(iter(manifest.signatures))]


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    shape = [-1 if isinstance(axis, str) else axis for axis in spec.shape]
    return {"name": spec.name, "datatype": datatype(spec.dtype), "shape": shape}


def _triton(spec: TensorSpec, joins: bool) -> dict[str, Any]:
    described = _tensor(spec)
    kind = datatype(spec.dtype)
    # Triton leaves the batch out of the shapes if max_batch_size is above 0.
    dims = described["shape"][1:] if joins else described["shape"]
    is_known = f"TYPE_{kind}" in TRITON_DTYPES  # 8-bit floats are not
    return {"name": spec.name, "data_type": f"TYPE_{kind}" if is_known else TRITON_DTYPES[0], "dims": dims}


def _statistics(key: Key, lane: Lane) -> dict[str, Any]:
    counted = lane.statistics
    calls = sorted(dict(counted.calls).items())  # the lane's thread may add to it meanwhile
    return {
        "name": key.model,
        "version": str(key.version),
        "last_inference": int(counted.last_s * 1e3),
        "inference_count": counted.rows,
        "execution_count": sum(count for _, (count, _) in calls),
        "inference_stats": {
            "success": _duration(counted.requests, counted.queue_s + counted.compute_s),
            "fail": _duration(counted.failed, 0.0),
            "queue": _duration(counted.requests, counted.queue_s),
            "compute_input": _duration(counted.requests, 0.0),
            "compute_infer": _duration(counted.requests, sum(seconds for _, (_, seconds) in calls)),
            "compute_output": _duration(counted.requests, 0.0),
        },
        "batch_stats": [
            {"batch_size": size, "compute_infer": _duration(count, seconds)} for size, (count, seconds) in calls
        ],
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * 1e9)}
