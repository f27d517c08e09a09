"""Loading of adapters by address: a run or a PEFT directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stack_core.abi.adapters import Adapters
from stack_core.abi.errors import ConversionError
from stack_core.abi.local_paths import local_address
from stack_core.abi.run_directory import RunDirectory
from stack_train.peft import FORMAT as PEFT
from stack_train.variables.trained_adapters import Digests, check_base, check_model, run_adapters

__all__ = ["read_adapters"]


def read_adapters(address: str, config: Any, digests: Callable[[], Digests]) -> Adapters:
    """Reads the adapters of a run or of a PEFT directory for a model.

    Args:
      address: directory, "run:DIRECTORY" or "peft:DIRECTORY".
      config: config of the model.
      digests: returns the digests of the model's leaves; called only if the adapters record the digests of their base.

    Raises:
      ConversionError: the address does not contain adapters, or their base model differs; names the keys, tensors or
        digests that differ.
    """
    address = local_address(address)
    scheme, separator, path = address.partition(":")
    directory = Path(path if separator and scheme in ("peft", "run") else address)
    if scheme == "peft" or PEFT.recognizes(directory):
        return PEFT.read_adapters(directory, config, digests)
    if not RunDirectory(directory).config.is_file():
        what = "holds neither a run nor an adapter of PEFT" if directory.is_dir() else "is not a directory"
        raise ConversionError(f"{address} {what}. Give a run that was trained with lora, or a directory of PEFT.")
    found = run_adapters(directory)
    check_model(directory, found, config)
    # Only a run whose checkpoint omits its base recorded the digests to compare.
    if found.base is not None:
        known = {name: (spec, found.base.digests[name]) for name, spec in found.base.specs.items()}
        check_base(address, known, digests())
    return found.adapters
