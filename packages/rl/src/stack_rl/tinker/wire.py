"""Protocol-buffer messages of the Tinker API, and their conversion from and to arrays."""

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.installing import install_command
from stack_rl.tinker.datums import Datum
from stack_rl.tinker.local import SampledSequence, SampleOutput
from stack_rl.tinker.training import ForwardBackwardOutput

__all__ = ["encode_forward_backward", "encode_samples", "messages", "parse_forward_backward"]

# Message: fields as "number name type"; "[]" marks repeated fields, "{}" maps from strings, and "?" optional ones.
_SCHEMA: Final[Mapping[str, str]] = {
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes?, 4 topk_sampled_logprobs TopkLogprobs",
    "SampleResponse": "1 sequences SampledSequence[], 2 prompt_logprobs bytes?, 3 topk_prompt_logprobs TopkLogprobs",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes?, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64[]",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64[]",
    "ArrayRecord": "1 type_tag string, 2 fields BatchedTensor{}, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord[], 3 metrics double{}",
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": "1 data bytes",
    "DmelChunk": "1 dmel bytes",
    "Chunk": "1 encoded_text EncodedTextChunk, 2 image ImageChunk, 3 dmel DmelChunk",
    "Datum": "1 model_input Chunk[], 2 loss_fn_inputs Tensor{}",
    "LossConfigValue": "1 number double?, 2 text string?",
    "ForwardBackwardRequest": (
        "1 model_id string, 2 seq_id int32, 3 data Datum[], 4 loss_fn string, 5 loss_fn_config double{}, "
        "6 forward_only bool, 7 loss_fn_config_v2 LossConfigValue{}"
    ),
}
_PACKAGE: Final = "stack_rl_tinker"
_DTYPES: Final = {1: np.float32, 2: np.int64, 3: np.int32}
_FLOAT32: Final = 1
_STOP_REASONS: Final = {"stop": 0, "length": 1}
_EMPTY_LOGPROB: Final = -99999.0


@functools.cache
def messages() -> Any:
    """Returns a namespace with the class of each message.

    Raises:
      ConfigError: the package protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        command = install_command("stack-rl[tinker]")
        raise ConfigError(f"The Tinker API needs the package protobuf ({error}). Install it: {command}") from error
    scalar = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")

    def add(message: Any, number: int, name: str, kind: str, *, repeated: bool) -> Any:
        label = scalar.LABEL_REPEATED if repeated else scalar.LABEL_OPTIONAL
        added = message.field.add(name=name, number=number, label=label)
        if kind in _SCHEMA or "." in kind:
            added.type, added.type_name = scalar.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
        else:
            added.type = getattr(scalar, f"TYPE_{kind.upper()}")
        return added

    for message_name, fields in _SCHEMA.items():
        message = file.message_type.add(name=message_name)
        for each in fields.split(", "):
            number, name, kind = each.split(" ")
            plain = kind.rstrip("[]{}?")
            if kind.endswith("{}"):
                entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                add(entry, 1, "key", "string", repeated=False)
                add(entry, 2, "value", plain, repeated=False)
                plain = f"{message_name}.{entry.name}"
            added = add(message, int(number), name, plain, repeated=kind.endswith(("[]", "{}")))
            if kind.endswith("?"):
                added.proto3_optional = True
                added.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{name}")
    # Its own pool, since the process may have Tinker's SDK with its messages.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _SCHEMA
    }
    return SimpleNamespace(**classes)


def parse_forward_backward(body: bytes) -> tuple[Any, list[Datum], dict[str, float | str]]:
    """Parses a ForwardBackwardRequest; returns it with its data and settings.

    Raises:
      DataError: the body is malformed, or has inputs other than tokens.
    """
    from google.protobuf.message import DecodeError

    request = messages().ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
        data = [_datum(each, number) for number, each in enumerate(request.data)]
    except (DecodeError, ValueError) as error:
        raise DataError(f"The body is not a ForwardBackwardRequest of the Tinker API: {error}.") from error
    settings: dict[str, float | str] = dict(request.loss_fn_config)
    # Clients send numbers in both fields, for servers that read a single one.
    for key, value in request.loss_fn_config_v2.items():
        settings[key] = value.number if value.HasField("number") else value.text
    return request, data, settings


def _datum(message: Any, number: int) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise DataError(f"Datum {number} has an image or audio, which this server does not take. Give tokens.")
        tokens += np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
    return Datum(tokens, {name: _array(name, each) for name, each in message.loss_fn_inputs.items()})


def _array(name: str, tensor: Any) -> np.ndarray:
    if tensor.dtype not in _DTYPES:
        raise DataError(f"{name} has the unknown dtype {tensor.dtype}.")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if not tensor.HasField("sparse_csr"):
        flat = np.frombuffer(tensor.dense, dtype)
        return flat.reshape(shape) if shape else flat
    csr = tensor.sparse_csr
    rows, columns = (np.frombuffer(each, np.int64) for each in (csr.crow_indices, csr.col_indices))
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(len(rows) - 1), np.diff(rows)), columns] = np.frombuffer(csr.values, dtype)
    return dense


def encode_forward_backward(output: ForwardBackwardOutput) -> bytes:
    """Encodes the result of `forward_backward`."""
    found = messages().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(output.metrics))
    arrays = [np.asarray(each["logprobs"], np.float32) for each in output.loss_fn_outputs]
    record = found.loss_fn_outputs.add(num_datums=len(arrays))
    batched = record.fields["logprobs"]
    batched.dtype, batched.data = _FLOAT32, b"".join(each.tobytes() for each in arrays)
    batched.offsets = np.cumsum([0, *(each.nbytes for each in arrays)], dtype=np.int64).tobytes()
    return found.SerializeToString()


def encode_samples(output: SampleOutput, *, prompt_logprobs: bool) -> bytes:
    """Encodes sampled continuations, with the prompt's log-probabilities if `prompt_logprobs` is True."""
    found = messages().SampleResponse()
    for each in output.sequences:
        _add_sequence(found.sequences.add(), each)
    if prompt_logprobs:
        values = [np.nan if each is None else each for each in output.prompt_logprobs]
        found.prompt_logprobs = np.asarray(values, np.float32).tobytes()
    if output.topk_prompt_logprobs:
        _fill_top(found.topk_prompt_logprobs, output.topk_prompt_logprobs)
    return found.SerializeToString()


def _add_sequence(message: Any, sequence: SampledSequence) -> None:
    message.stop_reason = _STOP_REASONS[sequence.stop_reason]
    message.tokens = np.asarray(sequence.tokens, np.int32).tobytes()
    message.logprobs = np.asarray(sequence.logprobs, np.float32).tobytes()
    if sequence.topk_logprobs:
        _fill_top(message.topk_sampled_logprobs, sequence.topk_logprobs)


def _fill_top(message: Any, top: Sequence[Sequence[tuple[int, float]]]) -> None:
    k = max(map(len, top))
    tokens, logprobs = np.zeros((len(top), k), np.int32), np.full((len(top), k), _EMPTY_LOGPROB, np.float32)
    for row, pairs in enumerate(top):
        for place, (token, logprob) in enumerate(pairs):
            tokens[row, place], logprobs[row, place] = token, logprob
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.k, message.length = k, len(top)
