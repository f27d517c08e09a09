"""DiLoCo: replicas of the model that train apart, and meet in an outer step after every few updates.

The mesh axis `data` is split into `replica` and the rest of `data`. Each replica has its own parameters and optimizer
state, arrays with a leading axis over `replica`, and updates them on its own part of the batch. An outer step averages
the parameters and gives all replicas the same new parameters:

    d = params - mean(replicas),  m <- b m + d,  replicas = params <- params - r (b m + d)

b is the momentum and r the outer learning rate. `TrainState.params` are the parameters after the last outer step, which
are evaluated and exported. Only an outer step, and the means of metrics, communicate between replicas.

Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023 (arXiv:2311.08105).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stack_core.abi.errors import ConfigError, ShardingError, TrainingError
from stack_core.abi.mesh import ShardingRules, in_mesh
from stack_core.abi.metrics import Metrics, combine
from stack_train.optim.optax_optimizer import Optimizer
from stack_train.optim.optimizer import OptimizerConfig
from stack_train.optim.outer import OuterConfig, outer_step
from stack_train.optim.placement import like_parameters
from stack_train.step.state import TrainState
from stack_train.variables.model_variables import ModelVariables

__all__ = [
    "OUTER_SCOPE",
    "REPLICA",
    "ReplicatedState",
    "across_replicas",
    "check_replicas",
    "replicate",
    "replicated_shardings",
    "separate_replicas",
    "split_data_axis",
    "train_apart",
    "within_replica",
]

REPLICA: Final = "replica"
"""Mesh axis whose devices hold different replicas."""

OUTER_SCOPE: Final = "outer_step"
"""Scope of the operations of an outer step in a compiled program."""

_STREAM: Final = 0x726570  # folded into the key of a replica

Update = Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, Metrics]]


class ReplicatedState(NamedTuple):
    """The optimizer's state of replicas that train apart.

    Attributes:
      replicas: parameters of each replica, [replicas, ...].
      inner: state of each replica's optimizer, [replicas, ...].
      momentum: sum of the outer gradients with decay, in the structure of the parameters.
    """

    replicas: Any
    inner: Any
    momentum: Any


def separate_replicas(optimizer: Optimizer) -> tuple[Optimizer, OuterConfig | None]:
    """Returns the optimizer of each replica, and the settings of the outer steps; None without replicas.

    Raises:
      ConfigError: the optimizer has an option that replicas do not support.
    """
    outer = optimizer.outer if isinstance(optimizer, OptimizerConfig) else None
    if not isinstance(optimizer, OptimizerConfig) or outer is None or outer.replicas == 1:
        return optimizer, None
    options = {
        "ema_decay": optimizer.ema_decay is not None,
        "skip_spikes": optimizer.skip_spikes is not None,
        "offload": optimizer.offload,
    }
    if found := [f"optimizer.{name}" for name, is_set in options.items() if is_set]:
        raise ConfigError(
            f"optimizer.outer.replicas is {outer.replicas}, and replicas that train apart do not support "
            f"{' and '.join(found)}. Remove {'it' if len(found) == 1 else 'them'}, or set optimizer.outer.replicas=1."
        )
    return replace(optimizer, outer=None), outer


def check_replicas(outer: OuterConfig, steps: int, unsupported: Mapping[str, bool]) -> None:
    """Checks that replicas support a step.

    Args:
      steps: total number of updates.
      unsupported: features that replicas do not support, each with True if the step has the feature.

    Raises:
      ConfigError: the step has such a feature, or the updates do not end with an outer step.
    """
    if found := [feature for feature, is_used in unsupported.items() if is_used]:
        raise ConfigError(
            f"optimizer.outer.replicas is {outer.replicas}, but {'; and '.join(found)}, which replicas that train "
            "apart do not support. Set optimizer.outer.replicas=1, or change that."
        )
    if rest := steps % outer.every_steps:
        raise ConfigError(
            f"run.steps is {steps}, and the last {rest} updates would be in no outer step, which is taken after every "
            f"{outer.every_steps} (optimizer.outer.every_steps). Set run.steps to a multiple, such as "
            f"{steps - rest + outer.every_steps}."
        )


def split_data_axis(mesh: Mesh, replicas: int) -> Mesh:
    """Returns the mesh with the axis `data` split into `replica`, which varies slowest, and `data`.

    Slices are the slow part of `data`, so as many replicas as slices have a slice each.

    Raises:
      ShardingError: the number of replicas does not divide the size of `data`. A range of hosts, with which this size
        may vary, then uses another number of hosts.
    """
    place, size = mesh.axis_names.index("data"), mesh.shape["data"]
    if size % replicas:
        raise ShardingError(
            f"optimizer.outer.replicas is {replicas}, and mesh.data is {size}, which is not a multiple of it. Each "
            f"replica needs its own devices along data: set mesh.data={replicas}, or a multiple, or "
            "optimizer.outer.replicas=1."
        )
    shape, names, types = mesh.devices.shape, mesh.axis_names, mesh.axis_types
    grid = mesh.devices.reshape(*shape[:place], replicas, size // replicas, *shape[place + 1 :])
    return Mesh(
        grid,
        (*names[:place], REPLICA, *names[place:]),
        axis_types=(*types[:place], types[place], *types[place:]),
    )


def across_replicas(rules: ShardingRules) -> ShardingRules:
    """Returns the rules on the split mesh, where `replica` and `data` together are the former axis `data`."""
    return ShardingRules(
        {name: tuple(part for axis in axes for part in _parts(axis)) for name, axes in rules.table},
    )


def within_replica(rules: ShardingRules) -> ShardingRules:
    """Returns the rules by which the arrays of one replica are split over its devices."""
    return ShardingRules({name: tuple(axis for axis in axes if axis != REPLICA) for name, axes in rules.table})


def _parts(axis: str) -> tuple[str, ...]:
    return (REPLICA, axis) if axis == "data" else (axis,)


def replicate(params: Any, init: Callable[[Any], Any], replicas: int) -> ReplicatedState:
    """Returns the state before the first step, in which all replicas are equal."""
    return ReplicatedState(_copies(params, replicas), _copies(init(params), replicas), optax.tree.zeros_like(params))


def replicated_shardings(
    state: ReplicatedState, params: Any, shardings: Any, within: Any, replicated: NamedSharding
) -> ReplicatedState:
    """Returns the sharding of every leaf of the state.

    Args:
      state: shapes of the state.
      params: shapes of the parameters.
      shardings: shardings of the parameters.
      within: shardings of the parameters by the rules of `within_replica`.
      replicated: sharding of an array that is not split.
    """
    of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.inner)
    inner = like_parameters(of_one, params, within, replicated)
    apart = lambda tree: jax.tree.map(lambda each: NamedSharding(each.mesh, PartitionSpec(REPLICA, *each.spec)), tree)
    return ReplicatedState(apart(within), apart(inner), shardings)


def train_apart(
    update: Update, state: TrainState, batch: Mapping[str, jax.Array], outer: OuterConfig, variables: ModelVariables
) -> tuple[TrainState, Metrics]:
    """Updates each replica on its part of the batch; takes an outer step after every `outer.every_steps` updates.

    Args:
      update: computes one update of a state on a batch.
      state: state whose `opt_state` is a `ReplicatedState`.
      batch: arrays [batch, ...]; each replica takes consecutive rows.
      outer: settings of the outer steps.
      variables: structure of the model.

    Returns:
      The next state, and the metrics combined over the replicas.

    Raises:
      TrainingError: no `use_mesh` with an axis of the replicas surrounds the call.
    """
    if in_mesh.value is None or in_mesh.value[0].shape.get(REPLICA) != outer.replicas:
        raise TrainingError(
            f"A step with optimizer.outer.replicas={outer.replicas} runs on the devices of each replica. Compile it "
            "with Program(step, mesh).compile(batch)."
        )
    mesh, rules = in_mesh.value
    shardings, _, _ = variables.split(variables.shardings(rules, mesh))
    replicas, inner, metrics = _update_each(update, state, batch, outer.replicas)

    def meet(params: Any, replicas: Any, momentum: Any) -> Any:
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), replicas)
        params, momentum = outer_step(params, jax.lax.with_sharding_constraint(mean, shardings), momentum, outer)
        return params, _copies(params, outer.replicas), momentum

    # A branch at run time: in other steps the replicas do not wait for each other's parameters.
    with jax.numpy_dtype_promotion("standard"), jax.named_scope(OUTER_SCOPE):
        is_outer = (state.step + 1) % outer.every_steps == 0
        operands = (state.params, replicas, state.opt_state.momentum)
        params, replicas, momentum = jax.lax.cond(is_outer, meet, lambda *unchanged: unchanged, *operands)
    opt_state = ReplicatedState(replicas, inner, momentum)
    return replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics


def _update_each(
    update: Update, state: TrainState, batch: Mapping[str, jax.Array], count: int
) -> tuple[Any, Any, Metrics]:
    """Returns the parameters and optimizer states of the replicas after one update, and the combined metrics."""
    mesh, rules = in_mesh.value
    own: ReplicatedState = state.opt_state

    def of_replica(index: Any, params: Any, inner: Any, frozen: Any, step: Any, key: Any, rows: Any) -> Any:
        params, inner = jax.tree.map(lambda x: x[0], (params, inner))
        key = jax.random.fold_in(jax.random.fold_in(key, _STREAM), index[0])
        with in_mesh((mesh, within_replica(rules))):
            found, metrics = update(TrainState(step, params, {}, frozen, inner, key), rows)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], (found.params, found.opt_state, metrics))

    apart, alike = PartitionSpec(REPLICA), PartitionSpec()
    # The remaining mesh axes are automatic: XLA shards the step of a replica over its devices like any step.
    params, inner, stacked = jax.shard_map(
        of_replica,
        axis_names={REPLICA},
        in_specs=(apart, apart, apart, alike, alike, alike, apart),
        out_specs=apart,
        check_vma=False,
    )(jnp.arange(count), own.replicas, own.inner, state.frozen, state.step, state.key, dict(batch))
    return params, inner, {name: combine(metric) for name, metric in stacked.items()}


def _copies(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)
