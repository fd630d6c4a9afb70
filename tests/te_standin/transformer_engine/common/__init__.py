"""Recipes of 8-bit products, by name."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
