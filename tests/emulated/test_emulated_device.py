"""The pretended CUDA device itself: it refuses what a GPU refuses, and counts what makes the host wait."""

from __future__ import annotations

import pytest
from emulated_ledger import grown

SAME = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"


def test_the_device_refuses_what_a_gpu_refuses(emulated):
    (errors,) = emulated.run("device").answers
    for name in ("add", "matrix product", "stack", "index of a CPU tensor"):
        assert errors[name].startswith(SAME), name
    assert errors["numpy"].startswith("can't convert cuda:0 device type tensor to numpy")
    assert errors["attention"].startswith("Expected query, key, value and attn_mask to be on the same device")
    assert errors["gloo"] == "allreduce_ of CUDA tensors in a group whose backend is gloo"
    assert errors["pinned"].startswith("unsupported operation: more than one element of the written-to tensor refers")
    assert errors["nccl"] == "No backend type associated with device type cpu"


def test_waits_are_counted_and_nothing_else_is(emulated):
    found = emulated.run("counting")
    assert {(part, what): count for part, what, _, count in found.waits} == {
        ("item", "item"): 1,
        ("bool", "item"): 1,
        ("mask", "nonzero"): 1,
        ("list", "copy from pageable memory"): 1,
        ("pageable", "copy from pageable memory"): 1,
        ("pinned, blocking", "blocking copy from pinned memory"): 1,
        ("down", "copy to host"): 1,
        ("index from the CPU", "copy from pageable memory"): 1,
        ("repeats", "repeat_interleave"): 1,
        ("stream", "synchronize"): 1,
    }
    assert {where for _, _, where, _ in found.waits} == {"megatron_rl/acting.py:act.<locals>.<lambda>"}


def test_kernels_are_counted_and_views_are_not(emulated):
    kernels = emulated.run("counting").kernels
    assert kernels["products"] == 2 and kernels["mask"] == 2 and "to itself" not in kernels


def test_a_wait_that_grows_is_told_unless_its_entry_says_that_it_does():
    entries = [
        {"where": "a.py:f", "what": "item", "parts": ["update"]},
        {"where": "b.py:g", "what": "item", "parts": ["update"], "grows_with": ["layers"]},
    ]
    few = [["update", "item", "a.py:f", 1], ["update", "item", "a.py:f", 1], ["update", "item", "b.py:g", 2]]
    many = [["update", "item", "a.py:f", 4], ["update", "item", "b.py:g", 4]]
    assert grown(few, many, entries, by="layers") == [
        "update: item, 2 times and then 4 times with more layers, in a.py:f"
    ]
    assert len(grown(few, many, entries, by="micro-batches")) == 2
    assert not grown(few, few, entries, by="layers") and not grown(many, few, entries, by="layers")


@pytest.mark.parametrize("case", ["device", "counting"])
def test_a_case_that_ran_is_not_run_again(emulated, case):
    assert emulated.run(case) is emulated.run(case)
