#!/usr/bin/env bash
# Installs the trainer and vLLM for NVIDIA GPUs into two environments that have one torch and one NCCL between them.
# The container recipes call it (slurm/Dockerfile, slurm/megatron_rl.def); on a cluster without containers call it from
# a checkout that all nodes see:
#   slurm/gpu/install.sh [TRAINER] [ENGINES]      default: .venv .venv-vllm
# It needs Python 3.11 or newer (PYTHON=...), and for Transformer Engine nvcc of CUDA 13 and a C++ compiler: its part
# for torch is compiled here, in about a quarter of an hour. It comes last: where that fails, both environments are
# there. TE=0 leaves it out; the trainer runs without it.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
trainer=${1:-$root/.venv}
engines=${2:-$root/.venv-vllm}
python=${PYTHON:-python3}
common=$root/slurm/gpu/versions.txt

# NVIDIA's own images set PIP_CONSTRAINT to the versions that they come with.
unset PIP_CONSTRAINT

# vLLM wants other versions of transformers than the trainer, so it has an environment of its own.
"$python" -m venv "$engines"
"$engines/bin/pip" install --constraint "$common" vllm "xxhash>=3"

"$python" -m venv "$trainer"
"$trainer/bin/pip" install --constraint "$common" --constraint "$root/constraints.txt" \
    torch setuptools wheel ninja pybind11
"$trainer/bin/pip" install --constraint "$common" --constraint "$root/constraints.txt" -e "$root"

if [ "${TE:-1}" = 1 ]; then
    # Its core comes as a wheel. Its part for torch is compiled against the torch that is there, and then asks for the
    # core of that torch's CUDA. It includes cudnn.h, but where there is a CUDA toolkit it looks for headers in that
    # alone, and toolkits have no cuDNN. The compiler finds cuDNN's headers, and NCCL's, in the wheels that torch brought.
    wheels=$("$trainer/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/nvidia
    headers=$wheels/cudnn/include:$wheels/nccl/include
    export C_INCLUDE_PATH=$headers${C_INCLUDE_PATH:+:$C_INCLUDE_PATH}
    export CPLUS_INCLUDE_PATH=$headers${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}
    "$trainer/bin/pip" install --constraint "$common" transformer-engine-cu13
    "$trainer/bin/pip" install --constraint "$common" --no-build-isolation "transformer-engine[core-cu13,pytorch]"
fi

# Both say what they have; a difference ends the installation.
seen=
for environment in "$engines" "$trainer"; do
    said=$("$environment/bin/python" -c 'import torch; print(torch.__version__, torch.cuda.nccl.version())')
    echo "$environment: torch and NCCL $said"
    [ -z "$seen" ] || [ "$seen" = "$said" ] || { echo "the two environments differ" >&2; exit 1; }
    seen=$said
done
