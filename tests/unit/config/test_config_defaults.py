"""Defaults of all settings: one that changes does so on purpose, and with a line in CHANGELOG.md."""

from pathlib import Path

from megatron_rl.config.describe import settings_of
from megatron_rl.config.schema import EvalConfig, GenerateConfig, SftConfig, TrainConfig

GOLDEN = Path(__file__).parents[2] / "golden/settings.txt"
COMMANDS = {"train": TrainConfig, "sft": SftConfig, "generate": GenerateConfig, "eval": EvalConfig}


def listed() -> str:
    """Every setting with its default, by command."""
    return "".join(
        f"{name} {row}\n" for name, schema in COMMANDS.items() for row, _ in settings_of(schema) if "=" in row
    )


def test_defaults_of_settings_change_on_purpose_alone():
    """`python tests/unit/config/test_config_defaults.py` writes the list anew."""
    assert listed().splitlines() == GOLDEN.read_text().splitlines()


if __name__ == "__main__":
    GOLDEN.write_text(listed())
