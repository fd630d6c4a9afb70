"""Recipes of 8-bit products. The stand-in has none: a recipe can be named, and is refused when it is used."""

from __future__ import annotations

from typing import Any


class Recipe:
    """The settings of 8-bit products."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class DelayedScaling(Recipe):
    """Scales from earlier steps."""
