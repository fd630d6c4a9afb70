"""Lists the columns of data that no part of a run reads, and refuses columns whose content a prompt or a sample would
lack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_rl.config.base import hint

TOOLS, SYSTEM = "tools", "system"
# {name of a column in other data sets and tools: the column that is read here, with the same content}
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "tool_defs", "tool_definitions", "tool_schemas", "tool_list", "available_tools", "functions",
            "function_definitions", "function_schemas", "api_list",
        ),
        TOOLS,
    ),
    **dict.fromkeys(("system_prompt", "system_message", "system_instruction", "sys_prompt"), SYSTEM),
}  # fmt: skip
# Columns that change what a model reads in TRL, verl or LLaMA-Factory, and that are not supported
UNSUPPORTED = (
    *("chat_template_kwargs", "history"),
    *("images", "image", "videos", "video", "audios", "audio"),
)


def lost_columns(row: Mapping[str, Any], named: Collection[str] = ()) -> Iterator[str]:
    """Yields an error message for each column whose content would change what a model reads, and that is not read.

    `named`: the keys that the settings of the data name. Columns with these names are read, and cause no message.
    """
    cure = "leave the column out, and the rows that need it"
    roots = {key.partition(".")[0] for key in named}
    for column in (*OTHER_NAMES, *UNSUPPORTED):
        if column in roots or not row.get(column):
            continue
        if column in OTHER_NAMES:
            yield f"{column!r} is not read: rename the column to {OTHER_NAMES[column]!r}, or {cure}"
        else:
            yield f"{column!r} is not read: {cure}"


def unread_text(columns: Collection[str], readable: Collection[str]) -> str:
    """Returns a text that names the columns that nothing reads, each with the most similar name in `readable`, such as
    "; not read: `promt` (did you mean 'prompt'?), `level`". Returns "" if there are none.
    """
    named = []
    for column in sorted(columns):
        similar = hint(column, readable, "")
        named.append(f"`{column}`" + (f" ({similar})" if similar else ""))
    return f"; not read: {', '.join(named)}" if named else ""
