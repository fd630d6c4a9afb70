"""Runs the stages of an iteration that the driver runs, for tests of recipes."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.training.iteration import CreditContext


def credited(recipe, iteration, source, context):
    """Returns the rollouts of an iteration with advantages, by role. The metrics of both stages go to
    `context.metrics`."""
    fresh = replace(context, handed_over={})
    collected = recipe.rollout(iteration, source, fresh)
    return recipe.credit(iteration, collected, CreditContext(handed_over=fresh.handed_over, metrics=fresh.metrics))
