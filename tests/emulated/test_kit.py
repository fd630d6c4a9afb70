"""The kit for one GPU (docs/how_to/gpu.md, "On your first GPU") runs on the pretended device with tiny models."""

from __future__ import annotations

import pytest

# What the pretended device cannot do, by the beginning of the names of metrics.
UNKNOWN_PEAK = "the peak of a device named 'emulated' is not known"


def test_the_tests_for_a_gpu_pass_and_none_is_skipped(emulated, last_letter):
    (seen,) = emulated.run("kit_tests", last_letter=str(last_letter)).answers
    assert not seen["failed"] and not seen["skipped"]
    files = {name.partition("::")[0].rpartition("/")[2] for name in seen["passed"]}
    assert files == {"test_gpu.py", "test_gpu_refit.py", "test_gpu_run.py", "test_gpu_state.py"}


# The pretended device cannot run Triton's kernels, and says so; torch's flash attention it can.
FORMS = {
    **{"layers": "torch", "attention": "flash", "log_probs": "torch", "gates_and_rotary": "torch"},
    **{"sums_of_gradients": "in products"},
}


def test_updates_are_measured(emulated):
    (told,) = emulated.run("kit_benchmark", part="train").answers
    metrics, lacking = told["metrics"], told["not_measured"]
    assert told["complete"] and told["machine"]["gpu"] == "emulated"
    for model in ("1.5B", "7B"):
        for kind in ("equal", "varied"):
            name = f"{model}/64/{kind}"
            assert metrics[f"{name}/pass_s"] > 0 and metrics[f"{name}/tflops"] > 0 and metrics[f"{name}/of_product"] > 0
            assert metrics[f"{name}/times_transformers"] > 0
            assert (f"{name}/update_s" in metrics) == (model == "1.5B")
            assert lacking.pop(f"{name}/mfu").startswith(UNKNOWN_PEAK)
            assert (f"{name}/update_tflops" in metrics) == (f"{name}/update_s" in metrics)
            assert (f"{name}/update_mfu" in lacking) == (model == "1.5B")
            lacking.pop(f"{name}/update_mfu", None)
            assert told["recomputed"][name] == "none"
            assert told["forms"][name] == FORMS
    measured = ("device/copy_gb_per_s", "head/torch_forward_s", "head/plain_passes_s", "attention/64/ours_forward_s")
    measured += ("cudnn/64/off_pass_s", "cudnn/64/on_pass_s")
    assert all(metrics[name] > 0 for name in measured)
    assert {*told["profile"][0]} == {"name", "calls", "ms", "share"} and len(told["profile"]) == 15
    assert lacking.pop("profile/kernels").startswith("the profiler of this torch sees the host alone")
    assert lacking.pop("head/triton")
    lacking.pop("attention/64/torch_varlen", None)  # as far as the pretended device has the kernels of torch
    assert not lacking


def test_rollouts_refits_and_sleep_are_measured(emulated):
    (told,) = emulated.run("kit_benchmark", part="engine").answers
    metrics = told["metrics"]
    assert told["complete"] and "not_measured" not in told and told["cudnn_attention"]["ours"] is False
    assert metrics["rows2/times_generate"] > 0 and metrics["rows4/ours_tokens_per_s"] > 0
    assert metrics["varied6/tokens_per_s"] > 0 and metrics["varied6/without_graphs_tokens_per_s"] > 0
    assert metrics["varied6/replays"] >= metrics["varied6/captures"] > 0
    assert (
        metrics["refit/gb_per_s"] > 0 and metrics["refit/of_device_copy"] > 0 and metrics["refit_verified/seconds"] > 0
    )
    assert metrics["sleep/frees_of_said"] == pytest.approx(1, abs=0.01)
    assert metrics["sleep/back_of_held"] == pytest.approx(1, abs=0.02)


def test_an_error_in_one_measurement_lost_all_later_ones(emulated):
    (told,) = emulated.run("kit_benchmark", part="engine", sleep_fails=True).answers
    assert told["not_measured"] == {"sleep": "RuntimeError: Triton Error [CUDA]: out of resource: shared memory"}
    assert told["complete"] and told["metrics"]["refit/gb_per_s"] > 0


NEED_TRITON = {"facts", "kernels", "head"}


def test_every_check_of_the_smoke_test_runs(emulated):
    (told,) = emulated.run("kit_smoke").answers
    found = told["file"]
    assert {name for name, one in found.items() if not one["ok"]} == NEED_TRITON, found
    assert {*found} - NEED_TRITON == {"sum_in_product", "varlen_attention", "nccl_one_rank", "graphs", "adam", "rates"}
    assert found["sum_in_product"]["error"] < 1e-6 and found["rates"]["up_gb_per_s"] > 0
    verdicts = {row["what"]: row["verdict"] for row in told["rows"]}
    assert verdicts == {name: "wrong" if name in NEED_TRITON else "ok" for name in found} | {"to send": "note"}
    assert told["rows"][-1]["finding"].endswith("smoke.json")
    assert all("send" in row["cure"] and row["finding"] for row in told["rows"] if row["verdict"] == "wrong")


def test_the_short_measurements_run_to_their_end(emulated):
    (told,) = emulated.run("kit_quick").answers
    metrics, lacking = told["metrics"], told["not_measured"]
    assert {name for name in lacking if not name.endswith("mfu")} == {"profile/kernels", "head/triton"}
    assert metrics["1.5B/64/equal/update_s"] > 0 and metrics["decode2/tokens_per_s"] > 0 and metrics["sleep/wake_s"] > 0
    assert [name for name in metrics if name.endswith("/seconds")] == [
        *("decode2/seconds", "refit/seconds", "varied6/seconds", "decode4/seconds", "refit_verified/seconds")
    ]
