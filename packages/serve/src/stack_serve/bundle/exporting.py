"""Writes functions and their parameters as a bundle."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.config import parse
from stack_core.errors import BundleError
from stack_core.runs.atomic_directory import atomic_directory
from stack_serve.bundle import calls, examples, opened, weights
from stack_serve.bundle.integrity import MANIFEST, MANIFEST_DIGEST, digest_line, digest_of
from stack_serve.bundle.manifest import (
    DTYPES,
    FORMAT,
    Example,
    Manifest,
    Program,
    Signature,
    TensorSpec,
    Weight,
)
from stack_serve.bundle.stablehlo import PINNED, current_target, lower

__all__ = ["Function", "export"]

_FILE_BYTES = 2**32

Shape = Sequence[int | str]


@dataclass(frozen=True)
class Function:
    """A function to export: `function(params, **inputs)` returns an array, which is called "output", or a mapping.

    Where every input and output begins with the axis "batch", rows of several requests are computed together: a row of
    the outputs must depend on the same row of the inputs alone.

    Attributes:
      inputs: the dtype and the shape of each; a shape has sizes, and names of axes that come in several.
      sizes: of each named axis; a program is made for every combination.
      pad: named axes that may be padded at their end, with the value that fills the inputs.
      examples: inputs by name; none makes one up.
    """

    function: Callable[..., Any]
    inputs: Mapping[str, tuple[str, Shape]]
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    pad: Mapping[str, float | int] = field(default_factory=dict)
    examples: Sequence[Mapping[str, np.ndarray]] = ()


def export(
    directory: str | Path,
    functions: Mapping[str, Function],
    params: Any = None,
    *,
    licence: str,
    name: str | None = None,
) -> Manifest:
    """Writes a bundle, whole or not at all, for the platform that JAX runs on here; overwrites nothing.

    Args:
      functions: by the names of their signatures; clients that name none get "predict".
      params: a pytree of arrays, which all functions share.
      licence: of the weights: an SPDX expression, or its text.
      name: of the model; None is the directory's, or its parent's for a version such as digits/1.

    Raises:
      BundleError: a function or a parameter cannot be exported.
      ConversionError: there is something at `directory`, or it cannot be written.
      InferenceError: an example does not fit its function.
    """
    directory = Path(directory)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path, _ in leaves]
    if len(set(paths)) < len(paths):
        raise BundleError(f"Two parameters have the path {next(p for p in paths if paths.count(p) > 1)!r}. Rename one.")
    arrays = dict(zip(paths, (leaf for _, leaf in leaves), strict=True))
    with atomic_directory(directory) as partial:
        traced = [_Traced(name, function, structure, list(arrays.values())) for name, function in functions.items()]
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
        self.signature = Signature(inputs=tuple(inputs), outputs=outputs, sizes=sizes, pad=dict(function.pad))

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
        for number, inputs in enumerate(self._function.examples or [examples.made_up(self.signature)]):
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
        named = dict(found) if isinstance(found, Mapping) else {"output": found}
        self._names = list(named)
        return list(named.values())

    def _outputs(self, inputs: Sequence[TensorSpec], sizes: Mapping[str, Sequence[int]]) -> tuple[TensorSpec, ...]:
        """The outputs; an axis that grows as a named one does has its name."""
        smallest = {axis: known[0] for axis, known in sizes.items()}
        plain = self._shapes(inputs, smallest)
        axes = [[*map(int, spec.shape)] for spec in plain]
        named: list[list[int | str]] = [[*sides] for sides in axes]
        for axis, known in sizes.items():
            larger = known[-1] if len(known) > 1 else known[0] + 1
            for place, spec in enumerate(self._shapes(inputs, {**smallest, axis: larger})):
                for side, size in enumerate(spec.shape):
                    if size == axes[place][side]:
                        continue
                    if (axes[place][side], size) != (known[0], larger):
                        raise BundleError(
                            f"Axis {side} of the output {self._names[place]!r} of {self.name!r} has the size "
                            f"{axes[place][side]} where {axis!r} has {known[0]}, and {size} where it has {larger}. "
                            "An axis of an output has the size of a named axis, or always the same."
                        )
                    named[place][side] = axis
        return tuple(
            _tensor(name, spec.dtype.name, shape) for name, spec, shape in zip(self._names, plain, named, strict=True)
        )

    def _shapes(self, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
        return jax.eval_shape(self._flat, *self._specs, *_specs(inputs, sizes))


def _check_axes(name: str, inputs: Sequence[TensorSpec], sizes: Mapping[str, Sequence[int]]) -> None:
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
    for path, leaf in [*arrays.items(), (None, None)]:
        array = None if path is None else np.asarray(leaf)
        full = sum(each.nbytes for each in batch.values()) + (array.nbytes if array is not None else 0) > _FILE_BYTES
        if batch and (array is None or full):
            partial = directory / "weights" / "partial"
            weights.write(partial, batch)
            file = f"weights/{digest_of(partial).removeprefix('sha256:')[:16]}.safetensors"
            partial.rename(directory / file)
            held += [Weight(path=each, file=file) for each in batch]
            batch = {}
        if path is not None and array is not None:
            batch[path] = array
    return tuple(held)
