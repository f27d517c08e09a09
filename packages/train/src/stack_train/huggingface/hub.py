"""Models of the Hugging Face hub by name: `hf:ORG/MODEL` or `hf:ORG/MODEL@REVISION`."""

import re
from pathlib import Path

from stack_core.abi.errors import ConversionError

__all__ = ["on_disk"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# Safetensors alone: other formats of the same weights would double the download, and pickles may run code.
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def on_disk(directory: Path) -> Path:
    """Returns the directory of a model, which is downloaded if `directory` is the name of a model on the hub.

    An existing directory is returned unchanged. Downloads go to the cache of `huggingface_hub` and are reused; its
    variables, such as HF_HOME, HF_HUB_OFFLINE and HF_TOKEN, apply.

    Args:
      directory: a directory, or ORG/MODEL with an optional @REVISION: a branch, a tag or a commit.

    Raises:
      ConversionError: the name, model or revision is not on the hub, it needs an agreement, or it is not in the cache
        and the hub cannot be reached.
    """
    name = str(directory)
    if directory.exists() or not _NAME.fullmatch(name):
        return directory
    from huggingface_hub import constants, errors, snapshot_download  # a dependency of tokenizers; imports in 0.3 s

    model, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=list(_FILES)))
    except errors.HFValidationError as error:
        raise ConversionError(
            f"hf:{name}: there is no such directory, and the hub has no such names: {error}. Correct the name."
        ) from error
    except errors.GatedRepoError as error:
        raise ConversionError(
            f"hf:{name}: the hub asks for an agreement first. Accept it at {constants.ENDPOINT}/{model}, then log in "
            "with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConversionError(f"hf:{name}: the model has no revision {revision!r}.") from error
    except errors.RepositoryNotFoundError as error:
        raise ConversionError(
            f"hf:{name}: there is no such directory, and no such model on the hub, or it is private: then log in with "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise ConversionError(
            f"hf:{name}: there is no such directory, the model is not in the cache {constants.HF_HUB_CACHE}, and the "
            f"hub cannot be reached: {str(error).splitlines()[0]} On a machine with a network: `hf download {model} "
            f"--local-dir {model.partition('/')[2]}`, then give the directory."
        ) from error
