"""Runs the stages of an iteration that the driver runs, for tests of recipes."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.training.iteration import CreditContext


def credited(recipe, iteration, source, context):
    """Returns the rollouts of an iteration with advantages, by role. The metrics of both stages go to
    `context.metrics`."""
    own = replace(context, handed_over={})
    found = recipe.rollout(iteration, source, own)
    return recipe.credit(iteration, found, CreditContext(handed_over=own.handed_over, metrics=own.metrics))
