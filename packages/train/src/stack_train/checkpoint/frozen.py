"""Records of frozen variables, which training never changes and a checkpoint therefore does not store."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stack_core.abi.errors import CheckpointError
from stack_core.runtime.digest import array_digests
from stack_train.checkpoint.leaves import LeafSpec, named_leaves, spec_of, stored_array

__all__ = ["FROZEN", "FrozenRecord", "frozen_document", "frozen_records"]

FROZEN = "frozen.json"


@dataclass(frozen=True)
class FrozenRecord:
    """The source of a model's frozen variables, with digests that identify the values.

    Attributes:
      source: "run:DIRECTORY", "hf:DIRECTORY", or "init" for variables initialized from the run's seed.
      step: training step of the source's checkpoint; 0 if the source is not a run.
      specs: shape and dtype of each leaf, by path.
      digests: digest of each leaf, by path; see `stack_core.runtime.digest`.
    """

    source: str
    step: int
    specs: Mapping[str, LeafSpec]
    digests: Mapping[str, str]

    @classmethod
    def of(cls, frozen: Any, *, source: str, step: int = 0) -> "FrozenRecord":
        """Records the specs and digests of `frozen`, a pytree of arrays."""
        leaves = named_leaves(frozen)
        digests = array_digests({name: stored_array(leaf) for name, leaf in leaves.items()})
        return cls(source, step, {name: spec_of(leaf) for name, leaf in leaves.items()}, digests)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "FrozenRecord":
        """Restores a record from the output of `to_plain`."""
        specs = {
            name: LeafSpec(tuple(leaf["spec"]["shape"]), leaf["spec"]["dtype"], leaf["spec"]["key_impl"])
            for name, leaf in plain["leaves"].items()
        }
        digests = {name: leaf["digest"] for name, leaf in plain["leaves"].items()}
        return cls(plain["source"], plain["step"], specs, digests)

    def to_plain(self) -> dict[str, Any]:
        """Converts the record to JSON values, with one SHA-256 of all names, shapes, dtypes and digests."""
        leaves = {name: {"spec": asdict(spec), "digest": self.digests[name]} for name, spec in self.specs.items()}
        # Sorted, because the hash must not depend on the order of the leaves.
        listing = json.dumps(leaves, sort_keys=True).encode()
        plain = {"source": self.source, "step": self.step, "sha256": hashlib.sha256(listing).hexdigest()}
        return {**plain, "leaves": leaves}

    def check(self, frozen: Any) -> None:
        """Checks that variables, once reloaded or initialized again, equal the recorded variables.

        Raises:
          CheckpointError: a shape, dtype or digest differs from the record; names each such leaf.
        """
        found = FrozenRecord.of(frozen, source=self.source, step=self.step)
        lines = [
            f"  {name}: {self._describe(name)} when the run began, {found._describe(name)} now"
            for name in dict.fromkeys([*self.specs, *found.specs])
            if self._describe(name) != found._describe(name)
        ]
        if lines:
            raise CheckpointError(
                f"Frozen variables of this run come from {self.source!r} (step {self.step}), which now differs:\n"
                + "\n".join(lines)
                + "\nRestore the source; the run's checkpoints do not store these variables."
            )

    def _describe(self, name: str) -> str:
        return f"{self.specs[name]} digest {self.digests[name]}" if name in self.specs else "absent"


def frozen_document(records: Mapping[str, FrozenRecord]) -> bytes:
    """Returns the content of `frozen.json`: a record for "model", the trained model, and one for each companion."""
    return json.dumps({name: record.to_plain() for name, record in records.items()}, indent=1).encode()


def frozen_records(documents: Mapping[str, bytes]) -> dict[str, FrozenRecord]:
    """Reads the records from a checkpoint's documents, by model; empty if the checkpoint stores all variables."""
    plain = json.loads(documents[FROZEN]) if FROZEN in documents else {}
    return {name: FrozenRecord.from_plain(record) for name, record in plain.items()}
