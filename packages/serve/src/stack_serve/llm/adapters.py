"""Serving of many low-rank adapters with one base model: validation, device pool and application in a step."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.adapters import Adapters, ExpectsAdapters, ReadsAdapters
from stack_core.abi.errors import GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.ops.building import LowRankWeight, is_quantized
from stack_core.text.images import image_reader_of
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.images import tower_parameters
from stack_serve.llm.unstacking import Layers

__all__ = [
    "AdapterShapes",
    "HostAdapter",
    "Pool",
    "Weights",
    "put",
    "read_all",
    "unusable",
    "with_rows",
]

_MERGE = "Merge it into its base (stack convert RUN run:MERGED) and serve that."


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in host memory, in the shapes of a pool slot.

    Attributes:
      name: name used in requests.
      factors: down[layers, d_in, rank], up[layers, rank, d_out] and scale[] for each parameter path of the pool. They
        are zero-padded to the pool's rank, and zero for parameters that the adapter leaves unchanged.
      number: unique number, different even from an earlier adapter of the same name.
    """

    name: str
    factors: Mapping[str, Mapping[str, np.ndarray]]
    number: int = field(default_factory=itertools.count().__next__)


@dataclass(frozen=True)
class AdapterShapes:
    """Shapes of the adapter pool, for which programs are compiled.

    Attributes:
      slots: maximum number of adapters on the devices.
      rank: rank of every slot, a power of two.
      targets: shape [layers, d_in, d_out] and dtype of each adapted parameter, by path.
    """

    slots: int
    rank: int
    targets: Mapping[str, jax.ShapeDtypeStruct]

    @classmethod
    def of(cls, checkpoint: GenerativeCheckpoint, config: EngineConfig, adapters: Mapping[str, Adapters]) -> Any:
        """Computes shapes that fit all adapters and the adapters that the checkpoint expects (`ExpectsAdapters`).

        The parameters are the union over the adapters; the rank is the maximum rank, rounded up to a power of two.

        Raises:
          GenerationError: an adapter is of an unsupported kind, its base is quantized or in a tower of images, or
            `config.tensor` exceeds 1.
        """
        if config.tensor > 1:
            raise GenerationError(
                f"Adapters are served on one device, not with tensor={config.tensor}. {_MERGE}", parameter="adapter"
            )
        paths, ranks = list[str](), [config.adapter_rank or 1]
        if isinstance(checkpoint, ExpectsAdapters):
            paths += checkpoint.adapter_paths
            ranks.append(checkpoint.adapter_rank)
        for name, factors in adapters.items():
            for path, each in factors.items():
                _check_kind(name, path, each)
                paths.append(path)
                ranks.append(each.rank)
        reader = image_reader_of(checkpoint)
        # Features of an image are computed once for all requests, without an adapter.
        if reader is not None and (found := tower_parameters(checkpoint, reader).intersection(paths)):
            raise GenerationError(
                f"{', '.join(sorted(found))} of {checkpoint.name}: adapters of a tower of images cannot be served with "
                f"others. {_MERGE}",
                parameter="adapter",
            )
        targets, most = dict[str, jax.ShapeDtypeStruct](), max(ranks)
        for path in paths:
            parameter = _at(checkpoint.parameters, path)
            if is_quantized(parameter):
                raise GenerationError(
                    f"{path} of {checkpoint.name} is quantized; adapters require floating-point parameters. Serve the "
                    "run from which it was quantized.",
                    parameter="adapter",
                )
            targets[path] = jax.ShapeDtypeStruct(parameter.shape, parameter.dtype)
        # Programs are compiled for one rank; a power of two lets adapters of
        # similar rank load later without recompilation.
        return cls(config.max_adapters, 1 << (most - 1).bit_length(), targets)

    def only(self, path: str) -> "AdapterShapes":
        """Returns the shapes restricted to one parameter."""
        return AdapterShapes(self.slots, self.rank, {path: self.targets[path]})

    def pool(self) -> "Pool":
        """Creates a pool whose slots are zero."""
        return Pool(
            {
                path: {
                    "down": jnp.zeros((shape[0], self.slots, shape[1], self.rank), target.dtype),
                    "up": jnp.zeros((shape[0], self.slots, self.rank, shape[2]), target.dtype),
                    "scale": jnp.zeros(self.slots, jnp.float32),
                }
                for path, target in self.targets.items()
                for shape in (target.shape,)
            }
        )

    def fitted(self, name: str, adapters: Adapters) -> HostAdapter:
        """Pads an adapter to the shapes of a slot.

        Raises:
          GenerationError: the adapter is of an unsupported kind, or exceeds the rank or the parameters of the pool.
        """
        for path, each in adapters.items():
            _check_kind(name, path, each)
        if unknown := [path for path in adapters if path not in self.targets]:
            raise GenerationError(
                f"Adapter {name!r} changes {', '.join(unknown)}, which had no adapter when the engine started, so its "
                f"programs cannot apply it. Adapted are: {', '.join(self.targets)}. Start the engine with it.",
                parameter="adapter",
            )
        most = max((each.rank for each in adapters.values()), default=0)
        if most > self.rank:
            raise GenerationError(
                f"Adapter {name!r} has rank {most}; the engine was started for {self.rank}. Start it with "
                f"adapter_rank={most} (stack serve --adapter-rank {most}).",
                parameter="adapter",
            )
        return HostAdapter(name, {path: self._padded(path, adapters.get(path)) for path in self.targets})

    def _padded(self, path: str, factors: Any) -> Mapping[str, np.ndarray]:
        target = self.targets[path]
        layers, d_in, d_out = target.shape
        down, up = np.zeros((layers, d_in, self.rank), target.dtype), np.zeros((layers, self.rank, d_out), target.dtype)
        if factors is not None:
            down[..., : factors.rank], up[:, : factors.rank] = factors.down, factors.up
        return {"down": down, "up": up, "scale": np.array(0.0 if factors is None else factors.scale, np.float32)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """Adapters on the devices.

    Attributes:
      factors: down[layers, slots, d_in, rank], up[layers, slots, rank, d_out] and scale[slots] for each parameter path;
        `down` and `up` may be `Layers`.
    """

    factors: Mapping[str, Mapping[str, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """Parameters and adapters of a step.

    Attributes:
      params: parameters of the model; some may be `Layers`.
      pool: adapters; None if the engine serves only the base model.
    """

    params: Any
    pool: Pool | None = None


def read_all(checkpoint: GenerativeCheckpoint, addresses: Mapping[str, str]) -> dict[str, Adapters]:
    """Reads the adapters at the given addresses, by name.

    Raises:
      GenerationError: the checkpoint does not support adapters.
      StackError: an adapter cannot be read, or belongs to another model.
    """
    if not addresses:
        return {}
    if not isinstance(checkpoint, ReadsAdapters):
        raise GenerationError(f"{checkpoint.name} does not support adapters.", parameter="adapter")
    return {name: checkpoint.read_adapters(address) for name, address in addresses.items()}


def with_rows(weights: Weights, rows: jax.Array) -> Any:
    """Replaces each adapted parameter with a `LowRankWeight` that applies the adapter of each token.

    Args:
      weights: parameters and adapters.
      rows: int32[tokens], adapter slot of each token; -1 selects the base model.
    """
    params = weights.params
    if weights.pool is None:
        return params
    for path, factors in weights.pool.factors.items():
        base = _at(params, path)
        layers = base.shape[0]
        # A scan slices every leaf of the weight along one axis, so arrays that all layers share are repeated.
        scale, of_layers = (jnp.broadcast_to(each, (layers, *each.shape)) for each in (factors["scale"], rows))
        weight = LowRankWeight(base, factors["down"], factors["up"], scale, of_layers, path)
        params = _replaced(params, _keys(path), weight)
    return params


def put(pool: Pool, slot: jax.Array, factors: Mapping[str, Mapping[str, jax.Array]]) -> Pool:
    """Returns the pool with an adapter written to a slot."""

    def write(pool_array: Any, new: jax.Array) -> Any:
        # The slot axis moves to the front in arrays of one layer.
        if isinstance(pool_array, Layers):
            return Layers(tuple(array.at[slot].set(new[layer]) for layer, array in enumerate(pool_array.arrays)))
        return pool_array.at[:, slot].set(new) if new.ndim else pool_array.at[slot].set(new)

    return Pool(
        {
            path: {name: write(pool_arrays[name], factors[path][name]) for name in ("down", "up", "scale")}
            for path, pool_arrays in pool.factors.items()
        }
    )


def _check_kind(name: str, path: str, factors: Any) -> None:
    if factors.magnitude is not None:
        fault = "has magnitudes (DoRA)"
    elif len(factors.down.shape) != 3:
        fault = f"has {len(factors.down.shape) - 2} axes of layers and experts"
    else:
        return
    raise GenerationError(
        f"Adapter {name!r} of {path} {fault}, which cannot be served with others. {_MERGE}", parameter="adapter"
    )


def unusable(faults: Mapping[str, Exception]) -> GenerationError:
    """Builds the error for parameters whose adapters the model cannot apply, from the error of each trace."""
    listing = "\n".join(f"  {path}: {str(error).splitlines()[0]}" for path, error in faults.items())
    return GenerationError(
        "The model uses these parameters in other ways than one product with their input, so their adapters cannot "
        f"be served with others:\n{listing}\n{_MERGE}",
        parameter="adapter",
    )


def _keys(path: str) -> Sequence[str | int]:
    return [int(step) if step.isdigit() else step for step in path.split("/")]


def _at(tree: Any, path: str) -> Any:
    for key in _keys(path):
        tree = tree[key]
    return tree


def _replaced(tree: Any, keys: Sequence[str | int], value: Any) -> Any:
    """Returns a copy of nested dicts with the value at a path replaced."""
    first, *rest = keys
    return {**tree, first: _replaced(tree[first], rest, value) if rest else value}
