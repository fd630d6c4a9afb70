"""The type of the setting `engine`: the settings of the embedded engine, or of one kind of servers (vLLM, SGLang)."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated, Union

import pydantic

from megatron_rl.config.engines import Embedded, Servers

# Import paths of the settings classes of all kinds of inference servers. The first kind is the default.
# The classes are imported by name, because a direct import would be circular: the engines' packages import the config.
# To add an engine, add a folder to megatron_rl/engines/ and one entry here. An installation may lack a folder.
KINDS = tuple(
    kind
    for kind in ("megatron_rl.engines.vllm.settings:Vllm", "megatron_rl.engines.sglang.settings:Sglang")
    if importlib.util.find_spec(kind.rpartition(".")[0]) is not None
)
_CLASSES = [vars(importlib.import_module(module))[name] for module, name in (kind.split(":") for kind in KINDS)]

if TYPE_CHECKING:
    Engine = Embedded | Servers
else:
    Engine = Annotated[Union[(Embedded, *_CLASSES)], pydantic.Field(discriminator="kind")]  # noqa: UP007


def default_servers() -> Servers:
    """Returns the settings of the default kind of inference servers, with all defaults."""
    return _CLASSES[0]()
