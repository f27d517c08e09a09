"""Writes functions and their parameters as a bundle."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_core.abi.config import parse
from stack_core.abi.errors import BundleError
from stack_core.runtime.atomic_directory import atomic_directory
from stack_serve.bundle import calls, examples, opened, weights
from stack_serve.bundle.independence import find_dependence
from stack_serve.bundle.integrity import MANIFEST, MANIFEST_DIGEST, digest_line, digest_of
from stack_serve.bundle.manifest import (
    BATCH,
    DTYPES,
    FORMAT,
    Example,
    Manifest,
    Program,
    Signature,
    TensorSpec,
    Weight,
    first_twice,
)
from stack_serve.bundle.stablehlo import PINNED, current_target, lower

__all__ = ["Function", "RowsDependWarning", "export"]

_FILE_BYTES = 2**32

Shape = Sequence[int | str]


@dataclass(frozen=True)
class Function:
    """A function to export: `function(params, **inputs)` returns an array, or a tree of arrays.

    A single array is called "output", others by their path: "probabilities" in a mapping, "hidden.0" for a tuple in it,
    "output.0" for a tuple.

    Attributes:
      inputs: dtype and shape of each input; a shape consists of sizes and of names of axes with several sizes.
      sizes: sizes of each named axis; a program is exported for every combination.
      pad: named axes that may be padded at their end, with the value that fills the inputs.
      examples: inputs by name; if empty, an example is generated.
      joins: compute rows of several requests together, along "batch", the leading axis of every input and output.
        None: if a test shows that each row of the outputs depends only on the same row of the inputs; True rejects
        the export otherwise; False computes each request separately.
    """

    function: Callable[..., Any]
    inputs: Mapping[str, tuple[str, Shape]]
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    pad: Mapping[str, float | int] = field(default_factory=dict)
    examples: Sequence[Mapping[str, np.ndarray]] = ()
    joins: bool | None = None


class RowsDependWarning(UserWarning):
    """Requests for a function are not joined, since a row of its outputs depends on other rows of its inputs."""


def export(
    directory: str | Path,
    functions: Mapping[str, Function],
    params: Any = None,
    *,
    licence: str,
    name: str | None = None,
) -> Manifest:
    """Writes a bundle atomically for the current JAX platform; overwrites nothing.

    Args:
      functions: functions by signature name; "predict" is the default signature for clients.
      params: pytree of arrays shared by all functions.
      licence: licence of the weights, as an SPDX expression or as its text.
      name: name of the model; None uses the directory's name, or its parent's for a version such as digits/1.

    Raises:
      BundleError: a function or a parameter cannot be exported, or the licence is empty.
      ConversionError: `directory` exists or cannot be written.
      InferenceError: an example does not fit its function.
    """
    if not licence:
        raise BundleError("The licence is empty. Give an SPDX expression, such as Apache-2.0, or its text.")
    directory = Path(directory)
    arrays, structure = _parameters(params)
    with atomic_directory(directory) as partial:
        # First, because a function that cannot be exported should fail before gigabytes are written.
        # A loop, because a comprehension is a frame for the warning's `stacklevel` on Python 3.11 alone.
        traced: list[_Traced] = []
        for key, function in functions.items():
            traced.append(_Traced(key, function, structure, list(arrays.values())))
        held = _write_weights(partial, arrays)
        programs = tuple(program for each in traced for program in each.write_programs(partial))
        kept = tuple(example for each in traced for example in each.write_examples(partial))
        manifest = Manifest(
            format=FORMAT,
            name=name or _name_of(directory.resolve()),
            stablehlo=PINNED,
            jax=jax.__version__,
            licence=licence,
            signatures={each.name: each.signature for each in traced},
            programs=programs,
            weights=held,
            examples=kept,
            files={path.relative_to(partial).as_posix(): digest_of(path) for path in sorted(partial.glob("*/*"))},
        )
        content = manifest.to_json()
        (partial / MANIFEST).write_bytes(content)
        (partial / MANIFEST_DIGEST).write_bytes(digest_line(content))
        opened.load(partial)  # It is worth nothing if it does not open, or computes something else.
    return manifest


def _parameters(params: Any) -> tuple[dict[str, Any], Any]:
    """Returns the arrays of a pytree by their paths, and its structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    named = [(jax.tree_util.keystr(path, simple=True, separator="/") or "params", leaf) for path, leaf in leaves]
    if (twice := first_twice(path for path, _ in named)) is not None:
        raise BundleError(f"Two parameters have the path {twice!r}. Rename one.")
    for path, leaf in named:
        dtype = _dtype_of(leaf)
        if dtype is None:
            raise BundleError(
                f"The parameter {path!r} is {str(leaf)[:100]!r} of type {type(leaf).__name__}; an array was expected. "
                "Keep everything else out of `params`; of an Equinox module: params, static = eqx.partition(module, "
                "eqx.is_array), and in the function module = eqx.combine(params, static)."
            )
        if dtype not in DTYPES:
            raise BundleError(f"The parameter {path!r} is {dtype}. A bundle can hold {', '.join(DTYPES)}.")
    return dict(named), structure


def _dtype_of(value: Any) -> str | None:
    """Returns the name of an array's dtype, or None for other values."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return str(value.dtype)
    return str(jnp.result_type(value)) if isinstance(value, bool | int | float | complex) else None


def _name_of(directory: Path) -> str:
    """The name of a model's directory: models/digits and models/digits/1 are both of digits."""
    return directory.parent.name if directory.name.isdecimal() else directory.name


class _Traced:
    """A function on its way into a bundle."""

    def __init__(self, name: str, function: Function, structure: Any, params: list[Any]) -> None:
        self.name = name
        self._function = function
        self._structure = structure
        self._params = params
        self._specs = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in params]
        self._names: list[str] = []
        inputs = [_tensor(name, dtype, shape) for name, (dtype, shape) in function.inputs.items()]
        sizes = {axis: tuple(sorted(set(known))) for axis, known in function.sizes.items()}
        _check_axes(name, inputs, sizes)
        outputs = self._outputs(inputs, sizes)
        found = Signature(inputs=tuple(inputs), outputs=outputs, sizes=sizes, pad=dict(function.pad))
        self.signature = dataclasses.replace(found, joins=self._joins(found))

    def _joins(self, signature: Signature) -> bool:
        """Decides whether rows of several requests are computed together; warns if that would mix them."""
        asked = self._function.joins
        if asked is False or not (signature.is_batched or asked):
            return False
        problem = f"{BATCH!r} is not the first axis, and no other one, of every input and output"
        if signature.is_batched:
            problem = self._dependence(dataclasses.replace(signature, joins=True))
        if problem is None:
            return True
        if asked:
            raise BundleError(f"Rows of {self.name!r} cannot be joined: {problem}. Leave `joins` out.")
        sizes = " or ".join(map(str, signature.sizes[BATCH]))
        warnings.warn(
            f"Requests for {self.name!r} are not joined, and need a batch of exactly {sizes}: "
            f"{problem}. Let each row depend on the same row of the inputs alone, or give joins=False.",
            RowsDependWarning,
            stacklevel=4,  # the caller of `export`
        )
        return False

    def _dependence(self, signature: Signature) -> str | None:
        params = jax.device_put(self._params)  # once for all calls
        compute = jax.jit(self._flat)
        given = [{name: np.asarray(array) for name, array in each.items()} for each in self._function.examples]
        with ops.for_export():
            return find_dependence(
                signature, lambda inputs: [np.asarray(output) for output in compute(*params, *inputs)], given
            )

    def write_programs(self, directory: Path) -> Iterator[Program]:
        (directory / "programs").mkdir(exist_ok=True)
        for sizes in self.signature.all_sizes():
            module, _ = lower(self._flat, [*self._specs, *_specs(self.signature.inputs, sizes)])
            label = ".".join([self.name, current_target(), *map(str, sizes.values())])
            file = f"programs/{label}.stablehlo"
            (directory / file).write_bytes(module.artifact)
            yield Program(
                signature=self.name,
                target=current_target(),
                sizes=sizes,
                file=file,
                kept=module.kept,
                calling_convention=module.calling_convention,
                custom_calls=module.custom_calls,
            )

    def write_examples(self, directory: Path) -> Iterator[Example]:
        (directory / "examples").mkdir(exist_ok=True)
        smallest = {axis: known[0] for axis, known in self.signature.sizes.items()}
        for number, inputs in enumerate(self._function.examples or [examples.made_up(self.signature, smallest)]):
            arrays = {name: np.asarray(array) for name, array in inputs.items()}
            calls.check(self.signature, arrays)
            ordered = [arrays[tensor.name] for tensor in self.signature.inputs]
            outputs = [np.asarray(output) for output in jax.jit(self._flat)(*self._params, *ordered)]
            named = dict(zip((tensor.name for tensor in self.signature.outputs), outputs, strict=True))
            file = f"examples/{self.name}.{number}.safetensors"
            examples.write(directory / file, arrays, named)
            yield Example(signature=self.name, file=file, **examples.tolerances(self.signature))

    def _flat(self, *arrays: Any) -> list[Any]:
        """The function with parameters and inputs in order; notes the names of the outputs."""
        params = jax.tree.unflatten(self._structure, arrays[: len(self._specs)])
        inputs = dict(zip(self._function.inputs, arrays[len(self._specs) :], strict=True))
        found = self._function.function(params, **inputs)
        outputs = jax.tree_util.tree_leaves_with_path(found if isinstance(found, Mapping) else {"output": found})
        self._names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in outputs]
        for name, (_, output) in zip(self._names, outputs, strict=True):
            if _dtype_of(output) is None:
                raise BundleError(f"The output {name!r} of {self.name!r} is {output!r:.100}; an array was expected.")
        return [output for _, output in outputs]

    def _outputs(self, inputs: Sequence[TensorSpec], sizes: Mapping[str, Sequence[int]]) -> tuple[TensorSpec, ...]:
        """The outputs; an axis that grows as a named one does has its name."""
        smallest = {axis: known[0] for axis, known in sizes.items()}
        plain = self._shapes(inputs, smallest)
        if not plain or (twice := first_twice(self._names)) is not None:
            problem = "no array" if not plain else f"two outputs called {twice!r}"
            raise BundleError(f"{self.name!r} returns {problem}; an array or a tree of arrays was expected.")
        axes = [[*map(int, spec.shape)] for spec in plain]
        named: list[list[int | str]] = [[*sides] for sides in axes]
        for axis, known in sizes.items():
            # A single size cannot show which axes of the outputs follow it, so another one is traced: a smaller one,
            # because it may be the largest that the function takes.
            other = known[-1] if len(known) > 1 else known[0] - 1 if known[0] > 1 else 2
            for place, spec in enumerate(self._shapes(inputs, {**smallest, axis: other})):
                for side, size in enumerate(spec.shape):
                    if size == axes[place][side]:
                        continue
                    if (axes[place][side], size) != (known[0], other):
                        raise BundleError(
                            f"Axis {side} of the output {self._names[place]!r} of {self.name!r} has the size "
                            f"{axes[place][side]} where {axis!r} has {known[0]}, and {size} where it has {other}. "
                            "An axis of an output has the size of a named axis, or always the same."
                        )
                    named[place][side] = axis
        return tuple(
            _tensor(name, spec.dtype.name, shape) for name, spec, shape in zip(self._names, plain, named, strict=True)
        )

    def _shapes(self, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
        return jax.eval_shape(self._flat, *self._specs, *_specs(inputs, sizes))


def _check_axes(name: str, inputs: Sequence[TensorSpec], sizes: Mapping[str, Sequence[int]]) -> None:
    for axis, known in sizes.items():
        if not all(isinstance(size, int) and 0 < size < 2**31 for size in known):
            raise BundleError(f"The axis {axis!r} of {name!r} has the sizes {known}; integers above 0 were expected.")
    named = {axis for spec in inputs for axis in spec.shape if isinstance(axis, str)}
    for axis in sorted(named ^ {axis for axis, known in sizes.items() if known}):
        what = "is in a shape and has no sizes" if axis in named else "has sizes and is in no input's shape"
        raise BundleError(f"The axis {axis!r} of {name!r} {what}. Give it both.")


def _specs(tensors: Sequence[TensorSpec], sizes: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(tensor.at(sizes), jnp.dtype(tensor.dtype)) for tensor in tensors]


def _tensor(name: str, dtype: str, shape: Shape) -> TensorSpec:
    if dtype not in DTYPES:
        raise BundleError(f"{name!r} is {dtype}, which a bundle cannot hold. Dtypes: {', '.join(DTYPES)}.")
    return parse(TensorSpec, {"name": name, "dtype": dtype, "shape": tuple(shape)}, path=name)


def _write_weights(directory: Path, arrays: Mapping[str, Any]) -> tuple[Weight, ...]:
    """Writes parameters into files that are named after their content, of up to 4 GiB unless one is larger."""
    (directory / "weights").mkdir()
    held: list[Weight] = []
    batch: dict[str, np.ndarray] = {}
    # The last pair writes the remaining batch.
    for path, leaf in [*arrays.items(), (None, None)]:
        array = None if path is None else np.asarray(leaf)
        full = sum(each.nbytes for each in batch.values()) + (array.nbytes if array is not None else 0) > _FILE_BYTES
        if batch and (array is None or full):
            # The name follows from the content, so the file is renamed once it is complete.
            partial = directory / "weights" / "partial"
            weights.write(partial, batch)
            file = f"weights/{digest_of(partial).removeprefix('sha256:')[:16]}.safetensors"
            partial.rename(directory / file)
            held += [Weight(path=each, file=file) for each in batch]
            batch = {}
        if path is not None and array is not None:
            batch[path] = array
    return tuple(held)
