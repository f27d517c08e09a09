"""The parts of a diffusers directory, each a folder with a `config.json` and tensors; read and written exactly."""

import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.traversals import unflatten_mapping

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError
from stack_core.abi.models import ModelFamily
from stack_core.chips.machine import usable_cores
from stack_core.runtime.atomic_directory import atomic_directory
from stack_train.models.reader import Reader, Setting
from stack_train.safetensors_files import StoredTensor, TensorSpec, plan_shards, read_tensors, write_shards
from stack_train.variables.model_variables import ModelVariables, values_of

__all__ = [
    "Component",
    "StoredComponent",
    "load_component",
    "open_component",
    "outline",
    "read_component_config",
    "save_component",
]

_CONFIG = "config.json"
_SHARD_BYTES = 10 * 10**9
_CLASS = "_class_name"
_MOST_THREADS = 8
_LAYER = re.compile(r"\.\d+\.")
_ENDS = {"kernel": ".weight", "scale": ".weight", "bias": ".bias", "gamma": ".gamma"}


def _nothing(_: Any) -> dict[str, Any]:
    return {}


def _dotted(path: str) -> str:
    return path.replace("/", ".")


@dataclass(frozen=True, kw_only=True)
class Component:
    """A model class of diffusers or transformers, and the equivalent family.

    Attributes:
      former_names: names of the class in older files.
      settings: fields that both configs have, by our name.
      fixed: keys with the only value that the model supports.
      silent: keys without an effect on the computation, in addition to `HARMLESS_KEYS`.
      names: maps paths of our modules to module names in the files, or of parameters to their full names. "{layer}"
        stands for the index of a layer, because our layers are stacked. A module without an entry has the same path in
        the files, with dots.
      rename: name of a module without an entry in `names`, if it is not the path with dots.
      first_layers: index of the first layer of stacked modules that do not begin at layer 0, by the first part of their
        path.
      squares: linear layers that are convolutions in the files, by path: channels and sides of each kernel's square.
      stem: name of the tensor files without suffix.
      model_type: value in `config.json` for a class of transformers; None for a class of diffusers.
      redundant: tensors that duplicate other tensors or are unused; "{layer}" stands for the index of a layer.
      prefix: prefix of all tensor names, which some checkpoints omit.
    """

    class_name: str
    former_names: tuple[str, ...] = ()
    family: ModelFamily
    settings: tuple[Setting, ...]
    names: Mapping[str, str]
    rename: Callable[[str], str] = _dotted
    fixed: Mapping[str, Any] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    read_others: Callable[[Reader], dict[str, Any]] = _nothing
    write_others: Callable[[Any], dict[str, Any]] = _nothing
    first_layers: Callable[[Any], Mapping[str, int]] = _nothing
    squares: Callable[[Any], Mapping[str, tuple[int, ...]]] = _nothing
    stem: str = "diffusion_pytorch_model"
    model_type: str | None = None
    redundant: tuple[str, ...] = ()
    prefix: str = ""

    def read_config(self, mapping: Mapping[str, Any], **settings: Any) -> Any:
        """Converts a `config.json` to our config.

        Args:
          settings: fields of our config that files lack, such as `dtype`.

        Raises:
          ConversionError: it requires unsupported features; names each key and value.
        """
        reader = Reader(mapping)
        # Marks these keys as read.
        reader.get(*self.silent)
        for name, value in self.fixed.items():
            reader.expect(name, value)
        found = {each.ours: reader.get(*each.names, default=each.default) for each in self.settings}
        found |= self.read_others(reader)
        if wrong := [*reader.problems, *reader.unread()]:
            raise ConversionError(
                f"The {_CONFIG} of {self.class_name} has settings that stack does not implement: {'; '.join(wrong)}."
                + (" A key that does not change what it computes can be deleted there." if reader.unread() else "")
            )
        try:
            return parse(self.family.config_class, {**found, "name": self.family.name, **settings})
        except ConfigError as error:
            raise ConversionError(f"{_CONFIG} describes no valid {self.class_name}: {error}") from error

    def write_config(self, config: Any) -> dict[str, Any]:
        """Returns the `config.json` of a config."""
        ours = {each.names[0]: getattr(config, each.resolved or each.ours) for each in self.settings}
        named: dict[str, Any] = {_CLASS: self.class_name}
        if self.model_type is not None:
            named = {
                "architectures": [self.class_name],
                "model_type": self.model_type,
                "torch_dtype": config.param_dtype,
            }
        return {**named, **ours, **self.fixed, **self.write_others(config)}

    def is_redundant(self, name: str) -> bool:
        """Checks whether `redundant` contains a tensor."""
        return name in self.redundant or _LAYER.sub(".{layer}.", name, count=1) in self.redundant

    def tensors_of(self, config: Any, path: str, parameter: np.ndarray) -> dict[str, np.ndarray]:
        """Views of a parameter as the tensors that it is there, by name; arrays that are filled fill the parameter."""
        module, _, end = path.rpartition("/")
        if path in self.names:
            name, kernel = self.names[path], False
        else:
            name = (self.names.get(module) or self.rename(module)) + _ENDS.get(end, f".{end}")
            kernel = end == "kernel"
        square = self.squares(config).get(module) if kernel else None
        first = self.first_layers(config).get(path.partition("/")[0], 0)
        layers = range(len(parameter)) if "{layer}" in name else ()
        parts = {name.format(layer=first + layer): parameter[layer] for layer in layers} or {name: parameter}
        return {each: _laid_out(part, square) if kernel else part for each, part in parts.items()}


def _laid_out(kernel: np.ndarray, square: tuple[int, ...] | None) -> np.ndarray:
    """Returns a kernel in torch's layout: [d_out, d_in], [d_out, *square], or [out, in, *sides].

    It is a writable view: only the axis that torch splits is split.
    """
    if kernel.ndim >= 4:
        return np.moveaxis(kernel, (-1, -2), (0, 1))
    turned = kernel.T
    return turned if square is None else turned.reshape(len(turned), *square)


@runtime_checkable
class Readable(Protocol):
    """A tensor that is not loaded."""

    def read(self) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class StoredComponent:
    """A folder whose config and tensors fit together, without the values of the tensors.

    Attributes:
      component: class of the model.
      config: config of the model.
      abstract: the model without values.
      tensors: the tensors of the folder by name.
    """

    component: Component
    config: Any
    abstract: Any
    tensors: Mapping[str, Readable]

    def read(self) -> Any:
        """Returns the model with the values of the tensors."""
        variables = ModelVariables.of(self.abstract)
        values = {path: np.empty(shape.shape, shape.dtype) for path, shape in variables.shapes.items()}

        def fill(name: str, view: np.ndarray) -> None:
            # Views, so reading the tensors fills the parameters without another copy.
            view[...] = self.tensors[name].read()

        views = _views(self.component, self.config, values)
        # Conversions of dtypes and transposed copies take longer than reading.
        with ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS)) as threads:
            list(threads.map(fill, views.keys(), views.values()))  # raises their errors
        return variables.merge(unflatten_mapping({path: jnp.asarray(value) for path, value in values.items()}))


def load_component(component: Component, directory: Path, **settings: Any) -> tuple[Any, Any]:
    """Reads a folder; returns the config and the model, computed in the dtype of the tensors; see `open_component`."""
    opened = open_component(component, directory, **settings)
    return opened.config, opened.read()


def open_component(component: Component, directory: Path, **settings: Any) -> StoredComponent:
    """Checks a folder and reads its config, but not the values of its tensors.

    Args:
      settings: fields of our config that files lack, such as `image_size`.

    Raises:
      ConversionError: the class differs, the config requires unsupported features, or the tensors do not match the
        model; lists all problems.
    """
    found = {_prefixed(name, component.prefix): each for name, each in read_tensors(directory, component.stem).items()}
    tensors = {name: tensor for name, tensor in found.items() if not component.is_redundant(name)}
    dtypes = {str(tensor.numpy_dtype) for tensor in tensors.values()}
    # float32 represents F16 and BF16 exactly.
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    config = read_component_config(component, directory, dtype=dtype, param_dtype=dtype, **settings)
    abstract, views = outline(component, config)
    _check(directory, views, tensors)
    return StoredComponent(component, config, abstract, tensors)


def read_component_config(component: Component, directory: Path, **settings: Any) -> Any:
    """Reads the config of a folder; see `open_component`."""
    mapping = _read_config(directory)
    given = mapping.get(_CLASS, (mapping.get("architectures") or ["none"])[0])
    if given not in (component.class_name, *component.former_names):
        raise ConversionError(f"{directory} holds a {given}, not a {component.class_name}.")
    return component.read_config(mapping, **settings)


def outline(component: Component, config: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns a model without values, and arrays with the shapes of its tensors in the files, by name."""
    abstract = nnx.eval_shape(lambda: component.family.build(config, key=jax.random.key(0)))
    # Arrays of zero strides have the shapes and take no memory.
    values = {
        path: np.broadcast_to(np.zeros((), shape.dtype), shape.shape)
        for path, shape in ModelVariables.of(abstract).shapes.items()
    }
    return abstract, _views(component, config, values)


def _views(component: Component, config: Any, values: Mapping[Any, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name: view
        for path, value in values.items()
        for name, view in component.tensors_of(config, "/".join(map(str, path)), value).items()
    }


def save_component(component: Component, directory: Path, config: Any, model: nnx.Module) -> None:
    """Writes a folder in diffusers' format atomically; overwrites nothing.

    Raises:
      ConversionError: `directory` exists.
    """
    tensors = {
        name: tensor
        for path, value in values_of(model).items()
        for name, tensor in component.tensors_of(config, "/".join(map(str, path)), np.asarray(value)).items()
    }
    specs = [TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    with atomic_directory(directory) as partial:
        (partial / _CONFIG).write_text(json.dumps(component.write_config(config), indent=2) + "\n", encoding="utf-8")
        write_shards(partial, plan_shards(specs, _SHARD_BYTES), tensors.items(), component.stem)


def _prefixed(name: str, prefix: str) -> str:
    return prefix + name.removeprefix(prefix)


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        mapping = json.loads((directory / _CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise ConversionError(
            f"{directory / _CONFIG} cannot be read: {error}. Each part of a model has one."
        ) from error
    if not isinstance(mapping, dict):
        raise ConversionError(f"{directory / _CONFIG} holds a {type(mapping).__name__}; an object was expected.")
    return mapping


def _check(directory: Path, expected: Mapping[str, np.ndarray], tensors: Mapping[str, StoredTensor]) -> None:
    missing, extra = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    problems = [f"{name} is missing; expected shape {expected[name].shape}" for name in missing]
    problems += [f"{name} is unexpected; it has shape {tensors[name].shape}" for name in extra]
    problems += [
        f"{name} has shape {tensors[name].shape}; expected {view.shape}"
        for name, view in expected.items()
        if name in tensors and tensors[name].shape != view.shape
    ]
    problems += [
        f"{name} has dtype {tensor.dtype}; F32, F16 and BF16 are read"
        for name, tensor in tensors.items()
        if tensor.numpy_dtype is None
    ]
    if problems:
        raise ConversionError(
            f"The weights in {directory} are not those of its {_CONFIG} ({len(problems)} tensors):\n  "
            + "\n  ".join(sorted(problems))
        )
