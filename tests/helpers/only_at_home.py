"""A recipe that can be imported where a run is submitted and not in a job, as if a package were missing there."""

import os

from megatron_rl.recipes.tango import Tango

__all__ = ["Tango"]

if "SLURM_JOB_ID" in os.environ:
    raise ImportError("this node lacks a package")
