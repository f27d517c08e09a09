"""Directories of sentence-transformers: pooling, normalization and maximum length of a text.

`modules.json` lists the modules: a Transformer, a Pooling and possibly a Normalize module, each with a directory.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.errors import GenerationError
from stack_core.text.embeddings import EmbeddingSettings

__all__ = ["EMBEDDING_FILES", "EncoderSettings", "read_encoder_settings"]

_MODULES, _TRANSFORMER, _DEFAULTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
_POOLING = "1_Pooling/config.json"
EMBEDDING_FILES = (_MODULES, _TRANSFORMER, _DEFAULTS, _POOLING)
"""Files of sentence-transformers beside `config.json`."""

_MODES: Mapping[str, Any] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
# Earlier releases have one key per mode.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True)
class EncoderSettings:
    """Settings of an encoder's directory.

    Attributes:
      embedding: pooling and normalization.
      max_tokens: maximum number of tokens of a text, including special tokens; None without a limit.
      lowercase: True if texts are converted to lower case before tokenization.
    """

    embedding: EmbeddingSettings
    max_tokens: int | None = None
    lowercase: bool = False


def read_encoder_settings(directory: Path | None) -> EncoderSettings:
    """Reads the settings of a directory; without `modules.json`, the normalized mean over a text's tokens.

    Raises:
      GenerationError: a file is malformed, or asks for a module or a pooling that is not supported.
    """
    transformer = {} if directory is None else _mapping(directory / _TRANSFORMER)
    found = (transformer.get("max_seq_length"), bool(transformer.get("do_lower_case")))
    modules = None if directory is None else _json(directory / _MODULES)
    if directory is None or modules is None:
        return EncoderSettings(EmbeddingSettings(pooling="mean"), *found)
    try:
        kinds = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (TypeError, KeyError) as error:
        raise GenerationError(f"{directory / _MODULES} is not a list of modules with type and path.") from error
    names = [kind for kind, _ in kinds]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise GenerationError(
            f"{directory / _MODULES} has the modules {', '.join(names)}; embeddings are computed with Transformer, "
            "Pooling and Normalize, in this order. Remove the others to use the vectors before them."
        )
    defaults = _mapping(directory / _DEFAULTS)
    if (prompt := defaults.get("default_prompt_name")) is not None:
        warnings.warn(
            f"{directory / _DEFAULTS} has the default_prompt_name {prompt!r}, which is not added to texts. Begin each "
            f"text with its prompt, {defaults.get('prompts', {}).get(prompt)!r}.",
            stacklevel=2,
        )
    pooling = _pooling(directory / kinds[1][1] / "config.json")
    return EncoderSettings(EmbeddingSettings(pooling=pooling, normalize="Normalize" in names), *found)


def _pooling(path: Path) -> Any:
    mapping = _mapping(path)
    flags = [mode for flag, mode in _FLAGS.items() if mapping.get(flag)]
    mode: Any = mapping.get("pooling_mode") or flags or "mean"
    modes = [mode] if isinstance(mode, str) else list(mode)
    if len(modes) != 1 or modes[0] not in _MODES:
        raise GenerationError(
            f"{path} asks for the pooling {' and '.join(map(str, modes))}; supported is one of {', '.join(_MODES)}."
        )
    return _MODES[modes[0]]


def _mapping(path: Path) -> Mapping[str, Any]:
    found = _json(path)
    if found is not None and not isinstance(found, dict):
        raise GenerationError(f"{path} holds a {type(found).__name__}, not an object. Restore it.")
    return found or {}


def _json(path: Path) -> Any:
    """Returns the content of a JSON file, or None if it does not exist."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise GenerationError(f"{path} cannot be read: {error}. Restore it.") from error
