"""The manifest of a bundle. No other module depends on the layout of format 1.

    manifest.json                    the manifest, see `Manifest`
    manifest.sha256                  its digest, in the format of sha256sum
    programs/SIGNATURE.TARGET.SIZES.stablehlo    a program for fixed shapes, as a portable StableHLO artifact
    weights/DIGEST.safetensors       parameters, each aligned to 64 bytes
    examples/SIGNATURE.N.safetensors inputs, and the outputs computed from them at export

All paths in a manifest are relative to the manifest's directory and use "/".
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, StringConstraints

from stack_core.abi.config import config, parse, to_mapping
from stack_core.abi.errors import BundleError, ConfigError, UnknownName, nearest

__all__ = [
    "BATCH",
    "DTYPES",
    "FORMAT",
    "Example",
    "Manifest",
    "Program",
    "Signature",
    "TensorSpec",
    "Weight",
    "first_twice",
    "parse_manifest",
    "unique_keys",
]

T = TypeVar("T")

FORMAT = 1

BATCH = "batch"
"""Axis along which requests are batched, if it is the first axis of every input and output."""

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
"""Supported dtypes, with their names in safetensors files."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
Dtype = Annotated[str, StringConstraints(pattern=f"^({'|'.join(DTYPES)})$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


@config
class TensorSpec:
    """Name, dtype and shape of an input or output.

    Attributes:
      name: name of the tensor, unique among the inputs or among the outputs of its signature.
      dtype: name of its dtype, a key of `DTYPES`.
      shape: size of each axis, or the name of an axis whose sizes `Signature.sizes` lists.
    """

    name: Name
    dtype: Dtype
    shape: tuple[NonNegativeInt | Name, ...]

    def at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape for given sizes of the named axes."""
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@config
class Signature:
    """Inputs and outputs of a function in a bundle.

    Attributes:
      inputs: name, dtype and shape of each input, in the order in which programs take them.
      outputs: name, dtype and shape of each output.
      sizes: supported sizes of each named axis, ascending. The bundle has a program for every combination. Empty if
        all shapes are fixed.
      pad: named axes that may be padded at their end up to the next size, with the value that fills the inputs. The
        padding is removed from the outputs. If `joins` is true, `batch` may be padded, too.
      joins: True if rows of several requests may share a call. Each row of the outputs then depends only on the same
        row of the inputs, which was tested at export.
    """

    inputs: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    outputs: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    sizes: Mapping[Name, tuple[PositiveInt, ...]] = Field(default_factory=dict)
    pad: Mapping[Name, float] = Field(default_factory=dict)
    joins: bool = False

    @property
    def is_batched(self) -> bool:
        """Returns whether the batch is the first axis of every input and output, and no other axis."""
        tensors = (*self.inputs, *self.outputs)
        return all(tensor.shape[:1] == (BATCH,) and BATCH not in tensor.shape[1:] for tensor in tensors)

    def all_sizes(self) -> Iterator[dict[str, int]]:
        """Yields every combination of sizes."""
        for combination in itertools.product(*self.sizes.values()):
            yield dict(zip(self.sizes, combination, strict=True))

    def __str__(self) -> str:
        inputs, outputs = (", ".join(map(str, tensors)) for tensors in (self.inputs, self.outputs))
        sizes = "; ".join(f"{axis} in {', '.join(map(str, sizes))}" for axis, sizes in self.sizes.items())
        alone = ", requests are not joined" if BATCH in self.sizes and not self.joins else ""
        return f"({inputs}) -> ({outputs})" + (f" with {sizes}{alone}" if sizes else "")


@config
class Program:
    """A signature exported for one target and one size of each named axis.

    Attributes:
      signature: name of the signature, a key of `Manifest.signatures`.
      target: platform name of `jax.export`: "cpu", "cuda", "tpu".
      sizes: size of each named axis. Empty if all shapes are fixed.
      file: path of the StableHLO artifact, a key of `Manifest.files`.
      kept: ascending indices of the arguments that the program takes, counting the parameters first, then the inputs.
      calling_convention: version of the calling convention of `jax.export`.
      devices: number of devices that the program runs on. Only 1 is supported.
      custom_calls: names of the custom calls in the program. Empty if it is pure StableHLO.
    """

    signature: Name
    target: Name
    sizes: Mapping[Name, PositiveInt] = Field(default_factory=dict)
    file: str
    kept: tuple[NonNegativeInt, ...]
    calling_convention: PositiveInt
    devices: Literal[1] = 1
    custom_calls: tuple[str, ...] = ()


@config
class Weight:
    """A parameter and the file that stores it.

    Attributes:
      path: path of the parameter in the tree, which is also its name in the file.
      file: path of the safetensors file, a key of `Manifest.files`.
    """

    path: str
    file: str


@config
class Example:
    """Inputs and expected outputs, which an opened bundle must reproduce within `atol + rtol * |output|`.

    Attributes:
      signature: name of the signature, a key of `Manifest.signatures`.
      file: path of the safetensors file with the inputs and outputs, a key of `Manifest.files`.
      rtol: relative tolerance.
      atol: absolute tolerance.
    """

    signature: Name
    file: str
    rtol: NonNegativeFloat
    atol: NonNegativeFloat


@config
class Manifest:
    """Contents of a bundle.

    Attributes:
      format: version of the bundle format, equal to `FORMAT`.
      name: name of the model.
      stablehlo: version of StableHLO in which the programs are serialized.
      jax: version of JAX that exported the programs.
      licence: licence of the weights, as an SPDX expression or as its text.
      signatures: inputs and outputs of each function, by its name.
      programs: exported programs, one for each target, signature and combination of sizes.
      weights: parameters, in the order in which programs take them. Empty if the programs have no parameters.
      examples: inputs and expected outputs that check an opened bundle. Empty if none were exported.
      files: SHA-256 digest of each file, by its path.
    """

    format: int
    name: Name
    stablehlo: str
    jax: str
    licence: Annotated[str, StringConstraints(min_length=1)]
    signatures: Annotated[Mapping[Name, Signature], Field(min_length=1)]
    programs: tuple[Program, ...]
    weights: tuple[Weight, ...] = ()
    examples: tuple[Example, ...] = ()
    files: Mapping[str, Digest]

    def signature(self, name: str | None) -> Signature:
        """Returns a signature by name. None selects the only signature, or `predict` if there are several.

        Raises:
          UnknownName: the bundle has no such signature, or `name` is None and none of several is called `predict`.
        """
        name = name if name is not None else self.default_signature
        if name not in self.signatures:
            known = ", ".join(self.signatures)
            raise UnknownName(
                f"{self.name!r} has no signature {name[:200]!r}.{nearest(name, self.signatures)} It has: {known}."
            )
        return self.signatures[name]

    @property
    def default_signature(self) -> str:
        """Name of the signature for requests that do not name one."""
        return next(iter(self.signatures)) if len(self.signatures) == 1 else "predict"

    @property
    def computes(self) -> str:
        """Readable list of the signatures."""
        return ", ".join(f"{name}{signature}" for name, signature in self.signatures.items())

    def to_json(self) -> bytes:
        """Returns the content of `manifest.json`."""
        return json.dumps(to_mapping(self), indent=1).encode() + b"\n"


def parse_manifest(content: bytes) -> Manifest:
    """Parses the content of `manifest.json`.

    Raises:
      BundleError: it is not valid JSON, has another format, or is inconsistent.
    """
    try:
        mapping = json.loads(content, object_pairs_hook=unique_keys)
    # Deeply nested JSON exhausts Python's stack.
    except (ValueError, RecursionError) as error:
        raise BundleError(f"manifest.json is not JSON: {error}. Export the bundle again.") from error
    # Before the fields, because another format may have others.
    found = mapping.get("format") if isinstance(mapping, dict) else None
    if found != FORMAT:
        raise BundleError(
            f"manifest.json has the format {found!r}; this stack-serve opens {FORMAT}. Upgrade it, or export again."
        )
    try:
        manifest = parse(Manifest, mapping)
    except ConfigError as error:
        raise BundleError(f"manifest.json: {error}") from error
    for problem in _contradictions(manifest):
        raise BundleError(f"manifest.json: {problem}. Export the bundle again.")
    return manifest


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a dict from the pairs of a JSON object.

    Raises:
      ValueError: a key occurs twice.
    """
    # JSON parsers disagree about which of two equal keys counts.
    if (twice := first_twice(key for key, _ in pairs)) is not None:
        raise ValueError(f"an object has the key {twice!r} twice")
    return dict(pairs)


def first_twice(values: Iterable[T]) -> T | None:
    """Returns the first value that repeats an earlier one, or None."""
    seen: set[T] = set()
    return next((value for value in values if value in seen or seen.add(value)), None)


def _contradictions(manifest: Manifest) -> Iterator[str]:
    parts = (*manifest.programs, *manifest.weights, *manifest.examples)
    yield from (f"{part.file!r} is not among the files" for part in parts if part.file not in manifest.files)
    yield from (f"{name!r} is not a path inside the bundle" for name in manifest.files if not _is_inside(name))
    for name, signature in manifest.signatures.items():
        yield from (f"{problem} in the signature {name!r}" for problem in _contradictions_of(signature))
    for part in (*manifest.programs, *manifest.examples):
        if part.signature not in manifest.signatures:
            yield f"{part.file!r} is of the signature {part.signature!r}, which is not there"
    yield from _contradictions_of_programs(manifest)
    if (path := first_twice(weight.path for weight in manifest.weights)) is not None:
        yield f"the parameter {path!r} is there twice"
    if (file := first_twice(part.file for part in (*manifest.programs, *manifest.examples))) is not None:
        yield f"two programs or examples have the file {file!r}"


def _contradictions_of_programs(manifest: Manifest) -> Iterator[str]:
    keys = [(program.target, program.signature, frozenset(program.sizes.items())) for program in manifest.programs]
    if (key := first_twice(keys)) is not None:
        yield f"two programs compute {key[1]!r} on {key[0]} for the sizes {dict(key[2])}"
    needed = [(name, sizes) for name, signature in manifest.signatures.items() for sizes in signature.all_sizes()]
    for target in sorted({program.target for program in manifest.programs}):
        for name, sizes in needed:
            if (target, name, frozenset(sizes.items())) not in keys:
                yield f"no program computes {name!r} on {target} for the sizes {sizes}"
    for program in manifest.programs:
        signature = manifest.signatures[program.signature]
        if dict(program.sizes) not in list(signature.all_sizes()):
            yield f"{program.file!r} is for the sizes {dict(program.sizes)}, which its signature does not have"
        arguments = len(manifest.weights) + len(signature.inputs)
        if list(program.kept) != sorted(set(program.kept)) or max(program.kept, default=0) >= arguments:
            yield f"{program.file!r} takes the arguments {list(program.kept)} of {arguments}"


def _contradictions_of(signature: Signature) -> Iterator[str]:
    named = {axis for tensor in (*signature.inputs, *signature.outputs) for axis in tensor.shape if _is_named(axis)}
    yield from (f"the axis {axis!r} has sizes or a place in a shape, not both" for axis in named ^ {*signature.sizes})
    yield from (f"the axis {axis!r} is padded and has no sizes" for axis in signature.pad.keys() - signature.sizes)
    for axis, sizes in signature.sizes.items():
        if not sizes or list(sizes) != sorted(set(sizes)):
            yield f"the sizes {list(sizes)} of the axis {axis!r} do not ascend"
    if signature.joins and not signature.is_batched:
        yield f"rows are joined, but {BATCH!r} is not the first axis, and no other one, of every tensor"
    for side in (signature.inputs, signature.outputs):
        if len({tensor.name for tensor in side}) < len(side):
            yield "two tensors have one name"


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    # A backslash separates directories on Windows, and a NUL ends a path in C.
    return not path.is_absolute() and ".." not in path.parts and str(path) == name and not {*name} & {"\\", "\0"}


def _is_named(axis: int | str) -> bool:
    return isinstance(axis, str)
