"""A model's config.pbtxt: read as Triton reads it, and changed with its comments kept.

    model_config("repo/gpt/config.pbtxt").backend          # Triton's own ModelConfig
    engine_config("repo/gpt_engine/config.pbtxt")          # the engine's options in it
    set_parameters(file, {"max_num_seqs": 8})

A file that cannot be read raises ConfigError with file, line and field.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.serving.engine.config import EngineConfig

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig


class ConfigError(ValueError):
    """A config.pbtxt is invalid; the message names file and field."""


def model_config(file: str | Path) -> "ModelConfig":
    """The file parsed into Triton's protobuf message."""
    from google.protobuf import text_format  # slow to import, and few callers need it
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    try:
        return text_format.Parse(Path(file).read_text(encoding="utf-8"), ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigError(f"{file}:{error}") from None


def engine_config(file: str | Path) -> EngineConfig:
    """The engine's options in its config.pbtxt."""
    given = {name: value.string_value for name, value in model_config(file).parameters.items()}
    try:
        return EngineConfig.of_parameters(given, str(file))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def set_parameters(file: str | Path, changes: dict[str, Any]) -> None:
    """Change the values of parameters in place; everything else stays as it is."""
    text = Path(file).read_text(encoding="utf-8")
    for name, value in changes.items():
        entry = rf'(key:\s*"{name}"\s+value:?\s*{{\s*string_value:\s*")[^"]*'
        text, count = re.subn(entry, rf"\g<1>{value}", text)
        if count != 1:
            raise ConfigError(f"{file} has no parameter {name!r}: add it there")
    Path(file).write_text(text, encoding="utf-8")
