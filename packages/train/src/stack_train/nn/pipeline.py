"""Pipeline parallelism: devices along the mesh axis "stage" hold different layers and process different microbatches.

All stages run the same program, tick by tick according to the table of a `Schedule`. An idle stage computes anyway and
discards the result, instead of waiting for its neighbours. No device takes a different branch, so layers can use
collectives along other mesh axes as usual. All stages compute the embedding before the layers and the loss after
them, but only the first stage's embedding and the last stage's loss are used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from stack_core.abi.errors import ShardingError
from stack_train.nn.boundary import Received, check_independent
from stack_train.nn.schedules import COLUMNS, Phase, Schedule
from stack_train.step.precision import add_gradients, zero_sums

__all__ = ["Values", "run_stages"]

Tree = Any


@partial(jax.tree_util.register_dataclass, data_fields=["trained", "mutable", "frozen"], meta_fields=[])
@dataclass(frozen=True)
class Values:
    """Values of a model's variables by name, by their role in a step.

    Attributes:
      trained: parameters with gradients.
      mutable: variables that the forward pass updates.
      frozen: variables that never change; a value may be a quantized array.
    """

    trained: Mapping[str, jax.Array]
    mutable: Mapping[str, jax.Array]
    frozen: Mapping[str, Any]


Function = Callable[[Values, Values, Received, Tree], tuple[Tree, jax.Array, Tree, tuple[Mapping[str, Any], ...]]]
"""Function (layers of a piece, other variables, message, microbatch) -> (activations and outputs of `Received`, loss,
metrics, the mutable variables of the layers and the others after the forward pass)."""


def run_stages(
    function: Function,
    layers: Values,
    shared: Values,
    microbatches: Tree,
    schedule: Schedule,
    *,
    gradients: bool,
    specs: tuple[Mapping[str, PartitionSpec], Mapping[str, PartitionSpec]],
) -> tuple[Tree, tuple[Mapping[str, jax.Array], ...] | None]:
    """Calls a function for each microbatch, and optionally sums the gradients of its losses.

    Mutable variables of layers pass through the microbatches in order, as on one device: each forward pass reads the
    updates of earlier ones. The backward pass recomputes with the values of its forward pass. Without gradients, the
    variables stay unchanged.

    Args:
      function: loss function, which calls `in_stage`.
      layers: variables [layers, ...], split over "stage".
      shared: the remaining variables, replicated over "stage". The last piece updates mutable variables, so they
        belong to layers after the divided ones.
      microbatches: arrays [microbatches, ...], replicated over "stage".
      schedule: schedule of the stages.
      gradients: computes gradients; otherwise only the forward half of the table runs.
      specs: partition specs of the gradients of `layers` and `shared`.

    Returns:
      The metrics, stacked [microbatches, ...]; and the gradients of the sum of all losses with respect to `layers` and
      `shared`, and their mutable variables after the last microbatch, or None.

    Raises:
      ShardingError: the layers do not divide into the pieces of the schedule.
      TrainingError: the function does not run `scan_layers` exactly once for each model.
    """
    stages, chunks = schedule.stages, schedule.chunks
    for name, leaf in [*layers.trained.items(), *layers.mutable.items(), *layers.frozen.items()]:
        if leaf.shape[0] % (stages * chunks):
            raise ShardingError(
                f"{name} has {leaf.shape[0]} layers, which is not a multiple of {stages * chunks}: mesh.stage={stages} "
                f"x run.pipeline.chunks={chunks} pieces. Change model.layers, mesh.stage or run.pipeline.chunks.",
                logical_axes=["layers"],
            )
        # The codes and scales of a quantized array are cut like one array.
        if any(part.shape[0] != leaf.shape[0] for part in jax.tree.leaves(leaf)):
            raise ShardingError(
                f"{name} is quantized with scales that its {leaf.shape[0]} layers share, which mesh.stage={stages} "
                "cannot divide. Quantize it with scales of each layer, or set mesh.stage=1.",
                logical_axes=["layers"],
            )
    # [layers, ...] -> [chunks, stages, layers of a piece, ...]: piece g is chunk g // stages of stage g % stages.
    # Interleaved chunks: neighbouring pieces lie on neighbouring stages, so results always move one stage on.
    pieces = jax.tree.map(lambda x: x.reshape(chunks, stages, -1, *x.shape[1:]), layers)
    by_stage, everywhere = PartitionSpec(None, "stage"), PartitionSpec()
    outs: Any = (everywhere, (by_stage, everywhere, by_stage, everywhere) if gradients else None)
    run = partial(_Stage.run, function, schedule, gradients, specs)
    mapped = jax.shard_map(run, axis_names={"stage"}, in_specs=(by_stage, everywhere, everywhere), out_specs=outs)
    metrics, found = mapped(pieces, shared, microbatches)
    if found is None:
        return metrics, None
    # [chunks, stages, layers of a piece, ...] -> [layers, ...], the inverse of `pieces`.
    of_layers, moved = (
        {name: x.reshape(whole[name].shape) for name, x in found[place].items()}
        for place, whole in ((0, layers.trained), (2, layers.mutable))
    )
    return metrics, (of_layers, found[1], moved, found[3])


@dataclass(frozen=True, eq=False)
class _Carry:
    """State that a stage carries between ticks."""

    inputs: Tree  # [slots, ...], activations and outputs received from the previous stage
    gradients: Tree  # [gradient_slots, ...], cotangents of this stage's outputs, from the next stage
    metrics: Tree  # [microbatches, ...]
    of_layers: Tree  # gradient sums of this stage's layers, in a wide dtype
    of_shared: Tree  # gradient sums of the shared parameters
    mutable: Tree  # mutable variables of this stage's layers, [chunks, layers of a piece, ...]
    earlier: Tree  # their values before recent forward passes, [recent_microbatches, chunks, ...]
    shared_mutable: Tree


jax.tree_util.register_dataclass(_Carry, list(_Carry.__dataclass_fields__), [])


@dataclass(frozen=True, eq=False)
class _Stage:
    """One stage inside `jax.shard_map`; its layers are arrays [chunks, layers of a piece, ...]."""

    function: Function
    schedule: Schedule
    with_gradients: bool
    specs: tuple[Mapping[str, PartitionSpec], Mapping[str, PartitionSpec]]
    layers: Values
    shared: Values
    microbatches: Tree
    index: Any

    @classmethod
    def run(
        cls,
        function: Function,
        schedule: Schedule,
        with_gradients: bool,
        specs: Any,
        layers: Any,
        shared: Any,
        rows: Any,
    ) -> Any:
        """Runs all ticks; returns the results of `run_stages` by stage."""
        # shard_map leaves an axis of size 1 for "stage".
        layers = jax.tree.map(lambda x: x[:, 0], layers)
        # Arrays that do not vary over stages would have their gradients summed over the stages in every tick.
        shared, rows = _varying((shared, rows))
        stage = cls(function, schedule, with_gradients, specs, layers, shared, rows, lax.axis_index("stage"))
        # The carry of the scans. One loop per phase: warm-up omits the backward half, and drain the forward half.
        carried = stage.start()
        for phase in schedule.phases:
            if phase.forward or with_gradients:
                ticks = {name: schedule.table[name][phase.start : phase.end] for name in COLUMNS}
                carried, _ = lax.scan(partial(stage.tick, phase), carried, ticks)
        # Replicates the results; with the axis of "stage" restored, shard_map concatenates the layers of all stages.
        metrics = lax.psum(carried.metrics, "stage")  # zero on all stages except the last
        if not with_gradients:
            return metrics, None
        of_layers, moved = ({name: x[:, None] for name, x in of.items()} for of in (carried.of_layers, carried.mutable))
        # Only the last stage has updated the shared variables.
        last = jax.tree.map(lambda x: jnp.where(stage.is_last_stage, x, jnp.zeros_like(x)), carried.shared_mutable)
        return metrics, (of_layers, lax.psum(carried.of_shared, "stage"), moved, lax.psum(last, "stage"))

    def start(self) -> _Carry:
        """Returns the initial state, filled with zeros."""
        row = jax.tree.map(lambda x: x[0], self.microbatches)
        piece = jax.tree.map(lambda x: x[0], self.layers)
        # Shapes of what crosses a stage boundary; nothing is computed.
        traced, shapes = jax.make_jaxpr(partial(self.call, None, 0), return_shape=True)(piece, self.shared, row)
        sent, _, metrics, _ = shapes
        if len(sent[0]) > 1:
            check_independent(traced)
        zeros = lambda tree, *lead: jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), tree)
        wanted = self.with_gradients
        schedule = self.schedule
        carried = _Carry(
            inputs=zeros(sent, schedule.slots),
            gradients=zeros(sent, schedule.gradient_slots) if wanted else (),
            metrics=zeros(metrics, schedule.microbatches),
            of_layers=zero_sums(self.layers.trained) if wanted else {},
            of_shared=zero_sums(self.shared.trained) if wanted else {},
            mutable=self.layers.mutable,
            earlier=zeros(self.layers.mutable, schedule.recent_microbatches) if wanted else {},
            shared_mutable=self.shared.mutable,
        )
        return self.sharded(_varying(carried))

    def call(
        self, received: Tree, piece: Any, layers: Values, shared: Values, row: Tree
    ) -> tuple[Tree, Any, Tree, tuple[Mapping[str, Any], ...]]:
        """Runs the function on a piece; returns its message, the loss, the metrics and the mutable variables."""
        activations, outputs = (None, None) if received is None else received
        message = Received(activations, outputs, piece, self.schedule.stages * self.schedule.chunks)
        return _varying(self.function(layers, shared, message, row))

    def tick(self, phase: Phase, carried: _Carry, columns: Mapping[str, Any]) -> tuple[_Carry, None]:
        """Runs one tick: at most one forward and one backward step, and the exchange with both neighbours."""
        now = {name: column[self.index] for name, column in columns.items()}
        before = carried
        if phase.forward:
            carried, sent = self.forward(carried, now)
            # ppermute runs on all stages in every tick. A stage without a new input has slot -1 and keeps its buffers.
            inputs = _written(carried.inputs, now["arriving_slot"], self.passed(sent, 1))
            carried = replace(carried, inputs=inputs)
        if phase.backward and self.with_gradients:
            # The slot of its input may receive a new one at the end of this tick.
            carried, of_input = self.backward(carried, before.inputs, now)
            # Cotangents travel in the opposite direction.
            gradients = _written(carried.gradients, now["arriving_gradient_slot"], self.passed(of_input, -1))
            carried = replace(carried, gradients=gradients)
        return self.sharded(carried), None

    def forward(self, carried: _Carry, now: Mapping[str, Any]) -> tuple[_Carry, Tree]:
        """Runs a piece forward; returns the changed state, and the message to the next piece."""
        chunk, microbatch = now["forward_chunk"], now["forward"]
        received, layers = _read(carried.inputs, now["forward_slot"]), self.layers_of(chunk, carried.mutable)
        row, shared = _read(self.microbatches, microbatch), replace(self.shared, mutable=carried.shared_mutable)
        sent, _, metrics, (moved, _) = self.call(received, self.piece(chunk), layers, shared, row)
        if not self.with_gradients:
            # The loss is valid only on the last piece; -1 leaves the metrics of other stages unchanged.
            place = jnp.where(self.is_last(chunk), microbatch, -1)
            return replace(carried, metrics=_written(carried.metrics, place, metrics)), sent
        # Idle ticks, with a chunk of -1, change nothing.
        mutable = _written(carried.mutable, chunk, moved)
        recent = jnp.where(microbatch >= 0, microbatch % self.schedule.recent_microbatches, -1)
        kept = _written(_read(carried.earlier, recent), chunk, layers.mutable)
        return replace(carried, mutable=mutable, earlier=_written(carried.earlier, recent, kept)), sent

    def backward(self, carried: _Carry, inputs: Tree, now: Mapping[str, Any]) -> tuple[_Carry, Tree]:
        """Recomputes a piece from its saved input and runs it backward.

        Returns:
          The changed state, and the cotangent of the message that the piece received.
        """
        chunk, microbatch = now["backward_chunk"], now["backward"]
        row, is_last, does = _read(self.microbatches, microbatch), self.is_last(chunk), microbatch >= 0
        layers = self.layers_of(chunk, _read(carried.earlier, microbatch % self.schedule.recent_microbatches))

        def run(of_layers: Tree, of_shared: Tree, received: Tree) -> tuple[tuple[Tree, Any], Tree]:
            shared = Values(of_shared, carried.shared_mutable, self.shared.frozen)
            piece = replace(layers, trained=of_layers)
            sent, loss, metrics, (_, moved) = self.call(received, self.piece(chunk), piece, shared, row)
            return (sent, loss), (metrics, moved)

        # Recomputes the piece: only its input is stored between the two passes.
        arguments = (layers.trained, self.shared.trained, _read(inputs, now["backward_slot"]))
        (sent, loss), vjp, (metrics, moved) = jax.vjp(run, *arguments, has_aux=True)
        arrived = _read(carried.gradients, now["gradient_slot"])
        # The last piece computes the loss, whose cotangent is 1; its output goes nowhere, so its cotangent is 0.
        of_output = jax.tree.map(lambda x, g: jnp.where(is_last, 0, g).astype(x.dtype), sent, arrived)
        of_layers, of_shared, of_input = vjp((of_output, jnp.where(is_last, 1, 0).astype(loss.dtype)))
        # Idle ticks compute a backward pass of arbitrary entries, whose gradients must not be added.
        counted = lambda x: jnp.where(does, x, 0)
        at = jnp.maximum(chunk, 0)
        changed = replace(
            carried,
            metrics=_written(carried.metrics, jnp.where(is_last, microbatch, -1), metrics),
            of_layers=jax.tree.map(
                lambda sums, x: sums.at[at].add(counted(x).astype(sums.dtype)), carried.of_layers, of_layers
            ),
            of_shared=add_gradients(carried.of_shared, jax.tree.map(counted, of_shared)),
            # The last piece runs microbatches backward in order.
            shared_mutable=jax.tree.map(lambda old, new: jnp.where(is_last, new, old), carried.shared_mutable, moved),
        )
        return changed, of_input

    def layers_of(self, chunk: Any, mutable: Tree) -> Values:
        """Returns the variables of a chunk's layers, with the mutable variables of all chunks given."""
        return _read(replace(self.layers, mutable=mutable), chunk)

    def piece(self, chunk: Any) -> Any:
        """Returns the index of a piece among all pieces; 0 or less for idle ticks, whose results are discarded."""
        return chunk * self.schedule.stages + self.index

    def is_last(self, chunk: Any) -> Any:
        return self.is_last_stage & (chunk == self.schedule.chunks - 1)

    @property
    def is_last_stage(self) -> Any:
        return self.index == self.schedule.stages - 1

    def passed(self, tree: Tree, by: int) -> Tree:
        """Shifts arrays by `by` stages along the pipeline, cyclically."""
        stages = self.schedule.stages
        # A cycle: with several chunks the last stage sends to the first stage, which holds the next chunk.
        pairs = [(stage, (stage + by) % stages) for stage in range(stages)]
        return jax.tree.map(lambda x: lax.ppermute(x, "stage", pairs), tree)

    def sharded(self, carried: _Carry) -> _Carry:
        """Shards gradients like their parameters along mesh axes other than "stage"."""
        if not self.with_gradients:
            return carried
        of_layers, of_shared = (
            {name: lax.with_sharding_constraint(x, specs[name]) for name, x in sums.items()}
            for sums, specs in zip((carried.of_layers, carried.of_shared), self.specs, strict=True)
        )
        return replace(carried, of_layers=of_layers, of_shared=of_shared)


def _varying(tree: Tree) -> Tree:
    """Casts arrays to the type of arrays that vary over stages."""

    def cast(x: Any) -> Any:
        return x if "stage" in jax.typeof(x).mat.varying else lax.pcast(x, ("stage",), to="varying")

    return jax.tree.map(cast, tree)


def _read(tree: Tree, place: Any) -> Tree:
    """Returns entry `place` of arrays; for -1, an arbitrary entry."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, jnp.maximum(place, 0), keepdims=False), tree)


def _written(tree: Tree, place: Any, value: Tree) -> Tree:
    """Returns arrays with entry `place` replaced; unchanged if `place` is -1."""
    at = jnp.maximum(place, 0)

    def write(x: Any, new: Any) -> Any:
        # Selects between two entries, not between two buffers.
        old = lax.dynamic_index_in_dim(x, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(x, jnp.where(place >= 0, new, old).astype(x.dtype), at, 0)

    return jax.tree.map(write, tree, value)
