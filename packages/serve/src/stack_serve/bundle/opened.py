"""A bundle that computes."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.errors import BundleError
from stack_serve.bundle import calls, examples, weights
from stack_serve.bundle.integrity import checked, mapped, read_manifest
from stack_serve.bundle.manifest import BATCH, Manifest, Program, Signature
from stack_serve.bundle.stablehlo import Module, current_target, open_module

__all__ = ["Bundle", "load"]

Compiled = Callable[..., list[jax.Array]]


def load(directory: str | Path, *, sealed: bool = False, replay: bool = True) -> "Bundle":
    """Opens a bundle: verifies the digest of every file, maps the weights and recomputes the examples.

    Args:
      sealed: copies the weights to memory, independent of later changes of the files; otherwise the files are mapped
        and must not change.
      replay: recomputes the examples and compares their outputs.

    Raises:
      BundleDamaged: a file does not match its digest; it was not parsed.
      BundleError: the format or the target is not supported, or an example has different outputs.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    # Weights are large and mapped; everything else is read.
    of_weights = {weight.file for weight in manifest.weights}
    views = {name: mapped(directory, manifest, name, sealed=sealed) for name in of_weights}
    contents = {name: checked(directory, manifest, name) for name in manifest.files if name not in of_weights}
    opened = Bundle(manifest, views, contents)
    if replay:
        opened.replay()
    return opened


class Bundle:
    """An opened bundle; a program is compiled when a call first needs it.

    Args:
      weights: contents of each file of weights.
      contents: contents of each remaining file.
    """

    def __init__(self, manifest: Manifest, weights_: Mapping[str, memoryview], contents: Mapping[str, bytes]) -> None:
        self.manifest = manifest
        self._contents = contents
        self._target = current_target()
        if self._target not in (targets := {program.target for program in manifest.programs}):
            raise BundleError(
                f"{manifest.name!r} has programs for {', '.join(sorted(targets)) or 'nothing'}; JAX runs on "
                f"{self._target} here. Export it there, or set JAX_PLATFORMS."
            )
        arrays = {name: weights.read(content) for name, content in weights_.items()}
        self._weights = [_put_parameter(arrays, weight.file, weight.path) for weight in manifest.weights]
        self._compiled: dict[tuple[str, tuple[int, ...]], Compiled] = {}
        # Requests on several threads would compile the same program at once.
        self._compiling = threading.Lock()

    def __repr__(self) -> str:
        weights_bytes = sum(array.nbytes for array in self._weights)
        return (
            f"<Bundle {self.manifest.name!r} on {self._target}, {weights_bytes / 1e6:.3g} MB: {self.manifest.computes}>"
        )

    def __call__(self, inputs: Mapping[str, np.ndarray], *, signature: str | None = None) -> dict[str, np.ndarray]:
        """Computes the outputs of a signature by name; None selects the only one, or `predict`.

        Rows beyond the largest size are computed in several calls; smaller batches are padded.

        Raises:
          InferenceError: the inputs do not match the signature; lists its inputs.
          UnknownName: the signature does not exist.
        """
        described = self.manifest.signature(signature)
        name = signature or self.manifest.default_signature
        arrays = {key: np.asarray(array) for key, array in inputs.items()}
        sizes = calls.check(described, arrays)
        if not described.joins:
            return dict(zip(_names(described), self._call(name, arrays, sizes), strict=True))
        parts: list[list[np.ndarray]] = []
        start = 0
        for rows in calls.split(described, sizes[BATCH]):
            part = {key: array[start : start + rows] for key, array in arrays.items()}
            parts.append(self._call(name, part, {**sizes, BATCH: rows}))
            start += rows
        return {key: np.concatenate(arrays) for key, *arrays in zip(_names(described), *parts, strict=True)}

    def program(self, signature: str, sizes: Mapping[str, int]) -> Compiled:
        """The compiled program of a signature for exactly these sizes; takes the inputs in order."""
        key = (signature, tuple(sizes[axis] for axis in self.manifest.signatures[signature].sizes))
        with self._compiling:
            if key not in self._compiled:
                self._compiled[key] = self._compile(self._find(signature, sizes))
        return self._compiled[key]

    def replay(self) -> None:
        """Computes the examples.

        Raises:
          BundleError: an output differs from the exported one by more than its tolerance.
        """
        for example in self.manifest.examples:
            inputs, expected = examples.read(self._contents[example.file])
            examples.compare(example, expected, self(inputs, signature=example.signature))

    def _call(self, name: str, inputs: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
        signature = self.manifest.signatures[name]
        padded = {axis: calls.size_for(signature, axis, size) for axis, size in sizes.items()}
        results = self.program(name, padded)(*calls.fitted(signature, inputs, padded))
        return calls.cropped(signature.outputs, [np.asarray(result) for result in results], sizes)

    def _find(self, signature: str, sizes: Mapping[str, int]) -> Program:
        for program in self.manifest.programs:
            if (program.signature, program.target, dict(program.sizes)) == (signature, self._target, dict(sizes)):
                return program
        name = self.manifest.name
        raise BundleError(f"{name!r} has no program for {signature!r} on {self._target} for {dict(sizes)}.")

    def _compile(self, program: Program) -> Compiled:
        signature = self.manifest.signatures[program.signature]
        weights_ = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self._weights]
        inputs, outputs = (
            [jax.ShapeDtypeStruct(tensor.at(program.sizes), jnp.dtype(tensor.dtype)) for tensor in tensors]
            for tensors in (signature.inputs, signature.outputs)
        )
        module = Module(self._contents[program.file], program.kept, program.calling_convention)
        call = open_module(module, [*weights_, *inputs], outputs)
        try:
            compiled = jax.jit(call).lower(*weights_, *inputs).compile()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            calls_ = f" It calls {', '.join(program.custom_calls)}." if program.custom_calls else ""
            raise BundleError(
                f"{program.file} cannot be compiled by jax {jax.__version__}: {error}.{calls_} Export the bundle again."
            ) from error
        # Parameters are arguments rather than constants of the program, so all programs share one copy.
        own = self._weights
        return lambda *arrays: compiled(*own, *arrays)


def _put_parameter(arrays: Mapping[str, Mapping[str, np.ndarray]], file: str, path: str) -> jax.Array:
    if path not in arrays[file]:
        raise BundleError(f"{file} lacks the parameter {path!r} that manifest.json names. Export the bundle again.")
    # On CPUs the array is the mapped memory itself.
    return jax.device_put(arrays[file][path], may_alias=True)


def _names(signature: Signature) -> list[str]:
    return [tensor.name for tensor in signature.outputs]
