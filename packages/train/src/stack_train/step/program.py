"""The program of a step: places its arrays on a mesh and compiles the step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, update_wrapper
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stack_core.abi.mesh import MeshAxes, MeshConfig, ShardingRules, use_mesh
from stack_core.abi.metrics import Metrics
from stack_core.chips.device_mesh import make_mesh
from stack_core.chips.machine import trim_heap
from stack_train.objectives import check_inputs
from stack_train.optim.placement import like_parameters
from stack_train.step.auxiliary import INIT
from stack_train.step.batches import batch_shapes, check_batch
from stack_train.step.replicas import (
    REPLICA,
    across_replicas,
    replicated_shardings,
    split_data_axis,
    within_replica,
)
from stack_train.step.state import AuxiliaryState, TrainState
from stack_train.step.step import Batch, Step
from stack_train.variables.model_variables import Tree, sharding_rules

__all__ = ["Program", "array_shapes", "compile_lowered"]


@dataclass(frozen=True, eq=False)
class Program:
    """A training step on a mesh: the sharding of each array, and the compiled programs.

    Attributes:
      step: the pure step.
      mesh: device mesh; all devices along `data` by default. With replicas that train apart, its axis `data` is split
        into `replica` and `data`.
      rules: mesh axes by logical axis. They override the family's rules, which override the default rules.
    """

    step: Step
    mesh: Mesh = field(default_factory=lambda: make_mesh(MeshConfig()))
    rules: Mapping[str, MeshAxes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step.outer is not None and REPLICA not in self.mesh.axis_names:
            object.__setattr__(self, "mesh", split_data_axis(self.mesh, self.step.outer.replicas))

    def init(
        self,
        variables: Tree | None = None,
        *,
        key: jax.Array,
        auxiliary: Mapping[str, Tree] | None = None,
    ) -> TrainState:
        """Initializes the state before the first step, with each leaf created on its sharding.

        Args:
          variables: existing variables of the untransformed model by path, floats of any dtype, which are donated.
            Missing variables are initialized from `key`.
          key: PRNG key of the initialization and of the run.
          auxiliary: variables of the auxiliary models from other runs, by name.
        """
        shardings = self.state_shardings
        # `Step.init` omits models of other runs, and the shardings need the structure of its output.
        made = {name: each for name, each in shardings.auxiliary.items() if not self._is_saved(name)}
        # Donated: otherwise a model's initial values and its state would be in memory together.
        init = jax.jit(self.on_mesh(self.step.init), out_shardings=replace(shardings, auxiliary=made), donate_argnums=0)
        state = init(variables or {}, key=key)
        saved = {name: AuxiliaryState(tree) for name, tree in (auxiliary or {}).items()}
        return replace(state, auxiliary={**state.auxiliary, **saved})

    def init_frozen(self, variables: Tree, *, key: jax.Array) -> tuple[Tree, Mapping[str, AuxiliaryState]]:
        """Initializes the frozen variables and the copies of the initial model, which checkpoints do not store."""
        copies = {name: each for name, each in self.state_shardings.auxiliary.items() if self._source(name) == INIT}

        def frozen(variables: Tree, key: jax.Array) -> tuple[Tree, Mapping[str, AuxiliaryState]]:
            # XLA removes the initialization of all parameters that are not returned.
            state = self.step.init(variables, key=key)
            return state.frozen, {name: state.auxiliary[name] for name in copies}

        return jax.jit(self.on_mesh(frozen), out_shardings=(self.state_shardings.frozen, copies))(variables, key)

    def compile(self, batch: Mapping[str, Any]) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """Compiles the step for the shapes of `batch`; the compiled step donates its state."""
        return self.runnable(compile_lowered(self.trace(batch).lower()), batch)

    def runnable(
        self,
        compiled: jax.stages.Compiled,
        batch: Mapping[str, Any],
        row_counts: Sequence[int] = (),
        variants: Sequence[Mapping[str, Any]] = (),
    ) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """Wraps the compiled step with a check that names the arrays of a batch with other shapes or dtypes.

        Each number of rows in `row_counts`, and each batch of `variants`, whose shapes differ from those of `batch`,
        compiles another program when it first occurs.

        On CPUs, compiled programs reject committed 4-bit arrays, because JAX reports their layouts in two ways (jax
        0.10.2). A state with such arrays goes through `jax.jit`, which compiles again or hits the compilation cache.
        """
        whole = batch_shapes(batch)
        first: Any = self._jitted(batch) if self._has_subbyte_codes else compiled
        programs = {array_shapes(whole): (first, whole)}
        known = {array_shapes(each): each for each in _shapes_of_run([whole, *map(batch_shapes, variants)], row_counts)}

        def step(state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, Metrics]:
            sizes = array_shapes(batch)
            if sizes not in programs and (shapes := known.get(sizes)) is not None:
                subbyte = self._has_subbyte_codes
                program = self._jitted(shapes) if subbyte else compile_lowered(self.trace(shapes).lower())
                programs[sizes] = program, shapes
            program, expected = programs.get(sizes, (first, whole))
            check_batch(batch, expected, "compile")
            stepped: tuple[TrainState, Metrics] = program(state, batch)
            return stepped

        return step

    def trace(self, batch: Mapping[str, Any]) -> jax.stages.Traced:
        """Traces the step for the shapes of `batch`; nothing is allocated.

        Raises:
          ShardingError: the mesh does not divide a variable, the batch, or an intermediate array.
          ConfigError: the batch lacks an array that the objective reads.
          TrainingError: the forward pass assigns a trained or frozen variable.
        """
        check_inputs(self.step.objective, batch_shapes(batch))
        return self._jitted(batch).trace(self.abstract_state, batch_shapes(batch))

    def compile_evaluation(self, batch: Mapping[str, Any]) -> Callable[..., Metrics]:
        """Compiles `Step.evaluate` for the shapes of `batch`."""
        auxiliary = {name: each.params for name, each in self.state_shardings.auxiliary.items()}
        shardings = (self.variable_shardings, self.batch_shardings(batch), auxiliary)
        # Nothing is donated, because training continues with these variables.
        jitted = jax.jit(self.on_mesh(self.step.evaluate), in_shardings=shardings)
        shapes = {name: each.params for name, each in self.abstract_state.auxiliary.items()}
        lowered = jitted.lower(self.abstract_variables, batch_shapes(batch), shapes)
        compiled: Any = jitted if self._has_subbyte_codes else compile_lowered(lowered)  # see `runnable`
        expected = batch_shapes(batch)

        def evaluate(variables: Tree, batch: Mapping[str, Any], auxiliary: Any = None) -> Metrics:
            check_batch(batch, expected, "compile_evaluation")
            metrics: Metrics = compiled(variables, batch, auxiliary or {})
            return metrics

        return evaluate

    def compiled_scores(self) -> Callable[..., Mapping[str, jax.Array]]:
        """Returns `Step.score` under `jax.jit`, compiled once per batch shape; its outputs are replicated."""
        return jax.jit(self.on_mesh(self.step.score), out_shardings=self._replicated)

    def on_mesh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a pure function of the step that shards its arrays over the mesh."""

        def on_mesh(*args: Any, **kwargs: Any) -> Any:
            with use_mesh(self.mesh, self.sharding_rules):
                return function(*args, **kwargs)

        on_mesh.__name__ = getattr(function, "__name__", "step")  # names the compiled program
        # JAX names the program's arguments, as profiles show them, by the signature of `__wrapped__`.
        return update_wrapper(on_mesh, function, assigned=(), updated=())

    def batch_shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Returns the shardings of a batch: the leading axis over all data-parallel mesh axes."""
        return {
            name: self.sharding_rules.sharding(
                self.mesh, ("batch", *[None] * (value.ndim - 1)), value.shape, name=f"batch[{name!r}]"
            )
            for name, value in batch.items()
        }

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; nothing is allocated."""
        # With shardings, because `CheckpointStore.restore` places each leaf according to its own sharding.
        return jax.tree.map(_with_sharding, self.step.abstract_state, self.state_shardings)

    @cached_property
    def state_shardings(self) -> TrainState:
        """The sharding of every leaf: variables by their logical axes, the optimizer's state like its parameters."""
        params, mutable, frozen = self.step.model.variables.split(self.variable_shardings)
        shapes = self.step.abstract_state
        if self.step.outer is None:
            opt_state = like_parameters(shapes.opt_state, shapes.params, params, self._replicated)
        else:
            variables = self.step.model.variables
            rules = within_replica(self.sharding_rules)
            within, _, _ = variables.split(variables.shardings(rules, self.mesh))
            opt_state = replicated_shardings(shapes.opt_state, shapes.params, params, within, self._replicated)
        auxiliary = {
            name: each.shardings(each.variables.shardings(self.sharding_rules, self.mesh), self._replicated)
            for name, each in self.step.auxiliary.items()
        }
        return TrainState(self._replicated, params, mutable, frozen, opt_state, self._replicated, auxiliary)

    @cached_property
    def variable_shardings(self) -> Tree:
        """The sharding of every variable, as nested dicts."""
        return self.step.model.variables.shardings(self.sharding_rules, self.mesh)

    @cached_property
    def abstract_variables(self) -> Tree:
        """Shapes, dtypes and shardings of all variables; nothing is allocated."""
        return jax.tree.map(_with_sharding, self.step.model.variables.abstract, self.variable_shardings)

    @cached_property
    def initial_variables(self) -> Tree:
        """Shapes, dtypes and shardings of the variables that `init` accepts, as nested dicts."""
        structure = self.step.model.untransformed
        return jax.tree.map(_with_sharding, structure.abstract, structure.shardings(self.sharding_rules, self.mesh))

    @cached_property
    def sharding_rules(self) -> ShardingRules:
        """All rules by which arrays are split over the mesh."""
        rules = sharding_rules(self.step.model.family, self.rules)
        return rules if self.step.outer is None else across_replicas(rules)

    @property
    def saved_auxiliary(self) -> tuple[str, ...]:
        """Names of the frozen auxiliary models that are loaded from other runs."""
        return tuple(filter(self._is_saved, self.step.auxiliary))

    def _is_saved(self, name: str) -> bool:
        return self._source(name) not in ("", INIT)

    def _source(self, name: str) -> str:
        return self.step.auxiliary[name].source

    def _jitted(self, batch: Mapping[str, Any]) -> Any:
        return jax.jit(
            self.on_mesh(self.step),
            donate_argnums=0,
            in_shardings=(self.state_shardings, self.batch_shardings(batch)),
            out_shardings=(self.state_shardings, self._replicated),
        )

    @property
    def _has_subbyte_codes(self) -> bool:
        """Checks whether the state has arrays of less than a byte an entry, on CPUs."""
        frozen = [each.params for each in self.abstract_state.auxiliary.values()]
        dtypes = (leaf.dtype for leaf in jax.tree.leaves((self.abstract_variables, frozen)))
        # `jnp.iinfo` accepts only integers.
        integers = (dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.integer))
        return self.mesh.devices.flat[0].platform == "cpu" and any(jnp.iinfo(dtype).bits < 8 for dtype in integers)

    @property
    def batch_parts(self) -> int:
        """Number of equal parts into which the devices and the microbatches split the rows of a batch."""
        schedule = self.step.schedule
        microbatches = self.step.accumulation_steps if schedule is None else schedule.microbatches
        return microbatches * math.prod(self.mesh.shape[axis] for axis in self.sharding_rules.mesh_axes("batch"))

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def compile_lowered(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program, and returns the compiler's memory to the system, hundreds of MB."""
    compiled = lowered.compile()
    trim_heap()
    return compiled


def array_shapes(batch: Mapping[str, Any]) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Returns the name and shape of each array of a batch, a key for compiled programs."""
    return frozenset((name, tuple(array.shape)) for name, array in batch.items())


def _shapes_of_run(
    batches: Sequence[Mapping[str, jax.ShapeDtypeStruct]], row_counts: Sequence[int]
) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Yields the shapes of batches, and of their parts with other numbers of rows."""
    for batch in batches:
        yield dict(batch)
        for rows in row_counts:
            yield {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in batch.items()}


def _with_sharding(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
