"""The protocol's messages, built from a table in a separate descriptor pool to avoid conflicts with a client's.

A row is a message and its fields: `name=number:type`, where `*` before a type repeats it, `{` is a map from strings to
it, and `|` before a name puts the field into the message's one choice. Source: the protocol's `grpc_predict_v2.proto`,
Triton's `grpc_service.proto` and `model_config.proto`, and gRPC's `health.proto`. An enum is an int32.
"""

import functools
from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["health_messages", "messages"]

_INFERENCE = """
ServerLiveRequest
ServerLiveResponse live=1:bool
ServerReadyRequest
ServerReadyResponse ready=1:bool
ModelReadyRequest name=1:string version=2:string
ModelReadyResponse ready=1:bool
ServerMetadataRequest
ServerMetadataResponse name=1:string version=2:string extensions=3:*string
ModelMetadataRequest name=1:string version=2:string
TensorMetadata name=1:string datatype=2:string shape=3:*int64
ModelMetadataResponse name=1:string versions=2:*string platform=3:string inputs=4:*TensorMetadata outputs=5:*TensorMetadata properties=6:{string
InferParameter |bool_param=1:bool |int64_param=2:int64 |string_param=3:string |double_param=4:double |uint64_param=5:uint64
InferTensorContents bool_contents=1:*bool int_contents=2:*int32 int64_contents=3:*int64 uint_contents=4:*uint32 uint64_contents=5:*uint64 fp32_contents=6:*float fp64_contents=7:*double bytes_contents=8:*bytes
InferInputTensor name=1:string datatype=2:string shape=3:*int64 parameters=4:{InferParameter contents=5:InferTensorContents
InferRequestedOutputTensor name=1:string parameters=2:{InferParameter
ModelInferRequest model_name=1:string model_version=2:string id=3:string parameters=4:{InferParameter inputs=5:*InferInputTensor outputs=6:*InferRequestedOutputTensor raw_input_contents=7:*bytes
InferOutputTensor name=1:string datatype=2:string shape=3:*int64 parameters=4:{InferParameter contents=5:InferTensorContents
ModelInferResponse model_name=1:string model_version=2:string id=3:string parameters=4:{InferParameter outputs=5:*InferOutputTensor raw_output_contents=6:*bytes
ModelStatisticsRequest name=1:string version=2:string
StatisticDuration count=1:uint64 ns=2:uint64
InferStatistics success=1:StatisticDuration fail=2:StatisticDuration queue=3:StatisticDuration compute_input=4:StatisticDuration compute_infer=5:StatisticDuration compute_output=6:StatisticDuration
InferBatchStatistics batch_size=1:uint64 compute_input=2:StatisticDuration compute_infer=3:StatisticDuration compute_output=4:StatisticDuration
ModelStatistics name=1:string version=2:string last_inference=3:uint64 inference_count=4:uint64 execution_count=5:uint64 inference_stats=6:InferStatistics batch_stats=7:*InferBatchStatistics
ModelStatisticsResponse model_stats=1:*ModelStatistics
ModelConfigRequest name=1:string version=2:string
ModelInput name=1:string data_type=2:int32 dims=4:*int64
ModelOutput name=1:string data_type=2:int32 dims=3:*int64
ModelDynamicBatching
ModelConfig name=1:string platform=2:string max_batch_size=4:int32 input=5:*ModelInput output=6:*ModelOutput |dynamic_batching=11:ModelDynamicBatching backend=17:string
ModelConfigResponse config=1:ModelConfig
RepositoryIndexRequest repository_name=1:string ready=2:bool
ModelIndex name=1:string version=2:string state=3:string reason=4:string
RepositoryIndexResponse models=1:*ModelIndex
RepositoryModelLoadRequest repository_name=1:string model_name=2:string
RepositoryModelLoadResponse
RepositoryModelUnloadRequest repository_name=1:string model_name=2:string
RepositoryModelUnloadResponse
"""  # noqa: E501, a message is a line
_HEALTH = """
HealthCheckRequest service=1:string
HealthCheckResponse status=1:int32
"""

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
}

Messages = Mapping[str, type[Any]]


@functools.cache
def messages() -> Messages:
    """The protocol's message classes by name."""
    return _built(_INFERENCE, "inference")


@functools.cache
def health_messages() -> Messages:
    """Returns the messages of gRPC's health protocol."""
    return _built(_HEALTH, "grpc.health.v1")


def _built(table: str, package: str) -> Messages:
    file = descriptor_pb2.FileDescriptorProto(name=f"stack/{package}.proto", package=package, syntax="proto3")
    for row in table.strip().splitlines():
        name, *fields = row.split()
        message = file.message_type.add(name=name)
        for field in fields:
            _add(message, field, package)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    full_names = {message.name: f"{package}.{message.name}" for message in file.message_type}
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))
        for name, full_name in full_names.items()
    }


def _add(message: descriptor_pb2.DescriptorProto, written: str, package: str) -> None:
    left, _, kind = written.partition(":")
    name, _, number = left.lstrip("|").partition("=")
    repeated = kind[0] in "*{"
    field = message.field.add(
        name=name, number=int(number), label=_Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    )
    if left.startswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if kind[0] == "{":
        # protobuf requires this name for the entries of a map.
        entry_name = "".join(word.capitalize() for word in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        _set_type(field, f"{message.name}.{entry_name}", package)
        field = entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL)
    _set_type(field, kind.lstrip("*{"), package)


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str, package: str) -> None:
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{package}.{kind}"
