#!/usr/bin/env bash
# Installs Slurm's daemons, munge and shellcheck for the tests that run on a real cluster (tests/helpers/slurm_cluster.py),
# and bubblewrap for those that run code of models in a sandbox (docs/how_to/tools.md).
# Says why where it cannot, and succeeds all the same: those tests are then skipped.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin" # where Debian puts the daemons

packages=(slurmctld slurmd slurm-client munge shellcheck bubblewrap)
commands=(slurmctld slurmd sbatch munged shellcheck bwrap)

missing=()
for command in "${commands[@]}"; do
    command -v "$command" >/dev/null || missing+=("$command")
done
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi

cannot() {
    echo "${missing[*]} not found, so tests that need them are skipped: $1"
    exit 0
}

as_root=()
command -v apt-get >/dev/null || cannot "there is no apt-get; install ${packages[*]} by your system's own means"
if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || cannot "apt-get needs root or a sudo that asks no password: sudo apt-get install ${packages[*]}"
    as_root=(sudo -n)
fi

# On a machine with systemd the packages' own slurmctld and slurmd do not start: they want an /etc/slurm/slurm.conf. munged does, and is idle.
install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get
    -o DPkg::Lock::Timeout=120 install -y -q --no-install-recommends "${packages[@]}")
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "installing ${packages[*]}"
if ! "${install[@]}" >"$log" 2>&1; then
    # the usual cause: package lists that are missing or old
    "${as_root[@]}" apt-get update -q >"$log" 2>&1 || cannot "apt-get update failed: $(tail -n 2 "$log" | tr '\n' ' ')"
    "${install[@]}" >"$log" 2>&1 || cannot "apt-get install failed: $(tail -n 2 "$log" | tr '\n' ' ')"
fi
