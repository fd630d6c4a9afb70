# Functions that the batch scripts share. They source it after their settings: ROOT CONFIG PYTHON SETUP CONTAINER SRUN.
# shellcheck shell=bash

# What a shell inside of another job or launcher leaves: `megatron-rl submit` takes it out, sbatch by hand does not.
[ -z "${SLURM_STEP_ID:-}" ] || unset SLURM_DISTRIBUTION SLURM_EXPORT_ENV "${!SLURM_STEP@}" "${!SLURM_CPU_BIND@}"
unset RANK WORLD_SIZE LOCAL_RANK "${!SRUN_@}" "${!PMI@}" "${!OMPI_@}"

# Only the owner of a run may write to its directory.
umask go-w

# The program runs from the checkout. Installed from a wheel, it is found by its own interpreter: site-packages on
# PYTHONPATH would reach the engines, whose interpreter has other packages.
[ ! -f "$ROOT/pyproject.toml" ] || export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}

# The job as scontrol and scancel take it: 17_3 for element 3 of array 17.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-$SLURM_JOB_ID}
RESTART=${SLURM_RESTART_COUNT:-0}
NAME=${SLURM_JOB_NAME##*-}-$JOB-r$RESTART
# Not empty where the elements of this array go on from each other.
CHAIN=${SLURM_ARRAY_JOB_ID:+1}
# An element ends after this many faults; its time limits do not count.
MAX_FAULTS=${MAX_FAULTS:-20}
# Elements of this array that are engines; only roles.sbatch has any.
ENGINES=

trap : USR1 # a warning that comes too early must not end this script

say() { echo "$(date '+%F %T') $NAME: $*"; }

setup() {
    # Module lines may use variables that are not set.
    set +u
    eval "${SETUP:-}"
    set -u
    # The run's own clock gets the end of this job in seconds since the epoch, or nothing where squeue does not answer
    # (date would make midnight of an empty text).
    local end
    end=$(SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$JOB" --format=%e || true)
    MEGATRON_RL_JOB_END=
    [ -z "$end" ] || MEGATRON_RL_JOB_END=$(date -d "$end" +%s 2>/dev/null || true)
    # Since Slurm 22.05 srun does not take the number of CPUs from the job by itself.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    # In another locale than the login node's, the names of directories would have other bytes.
    export MEGATRON_RL_JOB_END MEGATRON_RL_WARNING_S=${WARNING_S:-} PYTHONUNBUFFERED=1 PYTHONUTF8=1
    say "on $SLURM_JOB_NODELIST, until ${MEGATRON_RL_JOB_END:+$(date -d "@$MEGATRON_RL_JOB_END" '+%F %T')}"
}

# Runs the program once, on this node, in the container where there is one.
rl() {
    if [ ${#CONTAINER[@]} -gt 0 ] || [ ${#SRUN[@]} -gt 0 ]; then
        srun --nodes=1 --ntasks=1 --overlap --gres=none "${SRUN[@]}" \
            "${CONTAINER[@]}" "$PYTHON" -P -m megatron_rl.main "$@"
    else
        "$PYTHON" -P -m megatron_rl.main "$@"
    fi
}

# Runs the program on every task of the job, and sets STATUS. It runs in the background of this shell, which otherwise
# would not see signals until it ends. One task that fails ends all: without --kill-on-bad-exit the others would wait.
step() {
    local options=()
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    srun --kill-on-bad-exit=1 "${options[@]}" "${SRUN[@]}" "${CONTAINER[@]}" "$PYTHON" -P -m megatron_rl.main "$@" &
    local child=$!
    while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
    STATUS=0
    wait "$child" || STATUS=$?
}

# Queues this element again; Slurm ends this script then. slurmctld may be busy, or away for some minutes.
again() {
    local try
    say "queued again"
    for try in 1 2 3 4 5 6; do
        if scontrol requeue "$JOB"; then
            sleep 300
            exit 0
        fi
        say "could not be queued again (try $try)"
        sleep "${RETRY_S:-60}"
    done
    exit 1
}

# Succeeds when another element of the chain waits to go on from here. One that was queued again may come after all.
waiting_elements() {
    [ -n "$CHAIN" ] && [ -n "$(squeue --noheader --array --states=PENDING --jobs="$SLURM_ARRAY_JOB_ID" --format=%i)" ]
}

# Succeeds when the trainer still waits or runs, which its engines ask: somebody may have cancelled it, or its last
# slice was killed. Also succeeds where nobody said which job the trainer is, and where Slurm does not answer.
trainer_lives() {
    local trainer=${TRAINER:-} said
    [ -n "$trainer" ] || trainer=$(cat "$RUN_DIR/jobs/trainer" 2>/dev/null || true)
    [ -n "$trainer" ] || return 0
    if said=$(squeue --noheader --jobs="$trainer" --format=%i 2>&1); then
        [ -n "$said" ]
    else
        [[ $said != *"Invalid job id"* ]]
    fi
}

# Cancels the elements of this array that have not begun, and the run's engines: they are not needed any more.
end_chain() {
    [ -z "$CHAIN" ] || scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" || true
    [ -z "${ENGINES:-}" ] || scancel "$ENGINES" || true
    [ ! -f "$RUN_DIR/jobs/engines" ] || xargs --no-run-if-empty scancel <"$RUN_DIR/jobs/engines" || true
}

# Sets RUN_DIR. A node on which the program does not start may be broken; a config that cannot be read (status 2) is
# wrong everywhere.
where() {
    local status=0
    RUN_DIR=$(rl slice where "$CONFIG") && mkdir -p "$RUN_DIR/logs" "$RUN_DIR/jobs" || status=$?
    [ "$status" -ne 0 ] || return 0
    say "the program does not start here (status $status)"
    if [ "$status" -ne 2 ] && [ "$RESTART" -lt "$MAX_FAULTS" ]; then
        again
    fi
    exit 1
}

# Runs one slice of the trainer, from the newest checkpoint to the end of the run or of the time.
train() {
    local command=$1 what
    where
    what=$(rl slice begin "$CONFIG")
    say "$what"
    if [ "${what%%:*}" != go ]; then
        end_chain
        [ "${what%%:*}" = "done" ] || exit 1
        return
    fi
    # Every node checks itself first: a lost GPU or a read-only file system shows here, not as a hang of all ranks.
    step --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 -- \
        doctor "$CONFIG" ${PROFILE:+--profile="$PROFILE"} --quick
    if [ "$STATUS" -eq 0 ]; then
        # Slurm's warning (--signal=B:USR1@) makes a file; the run looks for it after every iteration, saves and leaves.
        trap 'say "time is nearly up"; touch "$RUN_DIR/leave.$JOB.$RESTART" || true' USR1
        step --label --output="$RUN_DIR/logs/$NAME.out" -- "$command" "$CONFIG"
    fi
    what=$(rl slice end "$CONFIG" --status "$STATUS")
    say "$what"
    rm -f "$RUN_DIR/leave.$JOB.$RESTART"
    case ${what%%:*} in
        done) end_chain ;;
        stopped) end_chain; exit 1 ;;
        slice) waiting_elements || again ;;
        again) again ;;
    esac
}

# Runs one server of the run's rollouts; $1 is its number among all servers. It comes back after its time limit and
# after a fault.
engine() {
    local role=${ROLES[$(($1 / REPLICAS))]} replica=$(($1 % REPLICAS)) what
    where
    if ! trainer_lives; then
        say "the trainer neither waits nor runs: nothing to serve"
        exit 0
    fi
    local warned=
    # $SLURM_JOB_ID would not do: for one element of an array it is the number of the whole array.
    trap 'warned=1; say "time is nearly up"; scancel --signal=TERM "$JOB" || true' USR1
    step --nodes=1 --ntasks=1 --output="$RUN_DIR/logs/$NAME.out" -- serve "$CONFIG" --role="$role" --replica="$replica"
    what=$(rl slice over "$CONFIG")
    say "$role-$replica left with status $STATUS; the run: $what"
    if [ "$what" = over ] || ! trainer_lives; then
        exit 0
    fi
    if [ -z "$warned" ]; then
        [ "$STATUS" -ne 2 ] || exit 1 # a wrong config stays wrong
        echo "$(date '+%F %T') status $STATUS" >>"$RUN_DIR/jobs/faults.$JOB"
        [ "$(wc -l <"$RUN_DIR/jobs/faults.$JOB")" -lt "$MAX_FAULTS" ] || exit 1
    fi
    again
}

# Asks a teacher for SFT data. Before the time limit the program is ended, which keeps every part of the answers that it
# has written, and the job is queued again, unless `megatron-rl stop` has left its file: CONFIG is jobs/config.yaml of
# the directory of the data.
generate() {
    local warned="" stop
    stop=$(dirname "$(dirname "$CONFIG")")/stop
    trap 'warned=1; say "time is nearly up"; scancel --signal=TERM "$JOB" || true' USR1
    step -- generate "$CONFIG"
    if [ "$STATUS" -ne 0 ] && [ -n "$warned" ]; then
        [ -e "$stop" ] || again
        say "not queued again: $stop is there"
    fi
    exit "$STATUS"
}
