"""A cache of encoded inputs, such as latents and text embeddings: each input is encoded once.

A folder of the cache belongs to one encoder. It consists of parts with up to a few thousand inputs each, which never
change. Inputs that no part holds are encoded into new parts, so data that grows encodes only its new inputs, and a
killed process loses at most one part.
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int64

from stack_train.data.cache import cached, complete_entries, digest_of

__all__ = ["EncodedRows", "encode_once"]

_KEYS = "keys.json"
_PART_INPUTS = 4096


@dataclass(frozen=True)
class EncodedRows:
    """Arrays of encoded inputs, memory-mapped from the parts of a cache.

    Attributes:
      parts: the arrays of each part by name, each [inputs of the part, ...].
      places: part and row of each input.
    """

    parts: Sequence[Mapping[str, Float[np.ndarray, "_ ..."]]]
    places: Int64[np.ndarray, "inputs 2"]

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: str) -> bool:
        return name in self.parts[0]

    def take(self, name: str, rows: Int64[np.ndarray, " rows"]) -> Float[np.ndarray, "rows ..."]:
        """Reads an array of some inputs."""
        places = self.places[rows]
        found = np.empty((len(rows), *self.parts[0][name].shape[1:]), np.float32)
        for part in np.unique(places[:, 0]):
            selected = places[:, 0] == part
            found[selected] = self.parts[part][name][places[selected, 1]]
        return found


def encode_once(
    folder: Path,
    keys: Sequence[str],
    encode: Callable[[Sequence[int]], Mapping[str, np.ndarray]],
    *,
    at_once: int,
) -> EncodedRows:
    """Encodes the inputs that the cache does not hold, and maps all of them from the cache.

    Args:
      folder: folder of one encoder in the cache.
      keys: digest of each input. Inputs with equal digests are encoded once.
      encode: function from the indices of `at_once` inputs to arrays [at_once, ...] by name. The last indices repeat
        to fill a batch, because encoders are compiled for a single shape.
      at_once: batch size of `encode`.

    Raises:
      DataError: the cache cannot be written.
    """
    first = {key: place for place, key in reversed(list(enumerate(keys)))}
    stored = _stored(folder, first.keys())
    # Sorted, because the names of parts must not depend on the order of the inputs.
    missing = sorted(key for key in first if key not in stored)
    for start in range(0, len(missing), _PART_INPUTS):
        part = missing[start : start + _PART_INPUTS]
        places = [first[key] for key in part]
        cached(folder / digest_of(part), lambda entry: _write(entry, part, places, encode, at_once))  # noqa: B023
    if missing:
        stored = _stored(folder, first.keys())
    entries = sorted({entry for entry, _ in stored.values()})
    parts = [{path.stem: np.load(path, mmap_mode="r") for path in entry.glob("*.npy")} for entry in entries]
    numbers = {entry: number for number, entry in enumerate(entries)}
    places_of = {key: (numbers[entry], row) for key, (entry, row) in stored.items()}
    return EncodedRows(parts, np.array([places_of[key] for key in keys], np.int64).reshape(-1, 2))


def _stored(folder: Path, keys: Set[str]) -> dict[str, tuple[Path, int]]:
    """Returns the part and the row of each input that the cache holds."""
    found: dict[str, tuple[Path, int]] = {}
    for entry in complete_entries(folder):
        for row, key in enumerate(json.loads((entry / _KEYS).read_text(encoding="utf-8"))):
            if key in keys:
                found.setdefault(key, (entry, row))
    return found


def _write(
    entry: Path,
    keys: Sequence[str],
    places: Sequence[int],
    encode: Callable[[Sequence[int]], Mapping[str, np.ndarray]],
    at_once: int,
) -> None:
    """Writes the encoded inputs to one array per file, `at_once` rows at a time."""
    files: dict[str, np.ndarray] = {}
    for start in range(0, len(places), at_once):
        batch = list(places[start : start + at_once])
        encoded = encode([*batch, *[batch[-1]] * (at_once - len(batch))])
        for name, values in encoded.items():
            if name not in files:
                shape = (len(places), *values.shape[1:])
                # `.npy` files cannot hold bfloat16.
                path = entry / f"{name}.npy"
                files[name] = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
            files[name][start : start + len(batch)] = values[: len(batch)]
    for array in files.values():
        array.flush()  # pyrefly: ignore[missing-attribute]
    (entry / _KEYS).write_text(json.dumps(list(keys)), encoding="utf-8")
