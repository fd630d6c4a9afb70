"""Writes traces of chosen iterations with torch's profiler, and reports what occupies GPU memory when it runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

from megatron_rl.config.run import Profile

FOLDER = "profiles"  # in the run directory
GIB = 1 << 30


@contextlib.contextmanager
def profiled(settings: Profile, directory: Path, *, iteration: int, rank: int) -> Iterator[None]:
    """Context manager that writes a trace of its block to RUN/profiles, if `settings` select the iteration and the
    rank. Stages of the iteration are ranges in the trace (timing.named_range).
    """
    if iteration not in settings.iterations or rank not in settings.ranks:
        yield
        return
    gpu = [ProfilerActivity.CUDA] if ProfilerActivity.CUDA in torch.profiler.supported_activities() else []
    every_thread = _ExperimentalConfig(profile_all_threads=True)  # the driver names stages
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *gpu], experimental_config=every_thread) as profiler:
        yield
    (directory / FOLDER).mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(directory / FOLDER / f"iteration_{iteration:06d}_rank_{rank}.json.gz"))


@contextlib.contextmanager
def memory_explained(
    directory: Path, rank: int, owners: Mapping[str, Callable[[], Mapping[str, int]]]
) -> Iterator[None]:
    """Context manager for a block that may run out of GPU memory. Adds a list of what occupies the memory to the error
    message, and writes a snapshot of torch's allocator to RUN/profiles.

    `owners`: {role: function that returns the role's bytes on the GPU, such as {"optimizer state": 1024}}.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = [(size, f"{role}'s {part}") for role, parts in owners.items() for part, size in parts().items()]
        sizes = [f"{name} {size / GIB:.2f} GiB" for size, name in sorted(held, reverse=True) if size]
        message = f"rank {rank} ran out of GPU memory: {str(error).splitlines()[0]}"
        message += f"; the memory holds {', '.join(sizes) or 'nothing of a role'}"
        if torch.cuda.is_available():
            other_bytes = torch.cuda.memory_allocated() - sum(size for size, _ in held)
            message += f", and {other_bytes / GIB:.2f} GiB of activations, buffers and other tensors"
            (directory / FOLDER).mkdir(exist_ok=True)
            file = directory / FOLDER / f"out_of_memory_rank_{rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(file))
            message += f"; {file} is a snapshot for https://docs.pytorch.org/memory_viz"
        message += "; lower roles.NAME.micro_batch_tokens, or divide the model further (roles.NAME.layout)"
        raise torch.OutOfMemoryError(message) from error
