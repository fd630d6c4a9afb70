"""The start of a training run: sends the policies' weights to their engines, and runs the preflight checks."""

from __future__ import annotations

from megatron_rl.spec.run_spec import first_iterations
from megatron_rl.training import preflight
from megatron_rl.training.events import Measured, Said
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.loop import Parts
from megatron_rl.training.progress import NothingTrained, Plan, Progress


def start(parts: Parts, context: RolloutContext, plan: Plan, progress: Progress) -> None:
    """Sends each policy's weights to its engine, and runs the preflight checks with the graders and engines of
    `context`. Called on the driver, before the first iteration.

    Raises NothingTrained if the run has no iteration, and PreflightFailure if a check fails.
    """
    if not sum(map(len, first_iterations(parts.desk.recipe.schedule(), plan.iterations))):
        raise NothingTrained("the run has 0 iterations: set run.iterations or the recipe's updates above 0")
    progress.use_rules(plan.best, plan.early_stop)
    parts.observe(Said("giving the engines the policies' weights"))
    with parts.watch("refit"):
        parts.fleet.start(progress.updates)
    if plan.preflight is None:
        return
    parts.observe(Said("preflight: trying the reward and the log-probabilities of the engines"))
    with parts.watch("preflight"):
        metrics = preflight.check(parts.fleet, context, parts.desk.recipe, plan.preflight)
    if metrics and progress.number == 0:
        parts.observe(Measured(progress.cycle, "preflight", metrics, 0))
