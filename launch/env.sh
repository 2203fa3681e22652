# Sourced by the launch scripts, which start the same loop: the recipe names its algorithm. They set
# `megarl_script`, their own name. Finds Python, reads the recipe's rank count, starts torchrun.

megarl_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

megarl_usage() {
    echo "usage: bash $megarl_script RECIPE [key=value …] [--replay RUN@N | --only PART] [--dry-run]"
    echo "  starts the recipe's ranks on this machine; --dry-run prints the command instead"
    echo "  also: torchrun --nproc_per_node N $megarl_script RECIPE [key=value …]"
    echo "  keys of a recipe, replays and parts of the loop: python -m megarl.train --help"
}

megarl_fail() {
    echo "megarl: $*" >&2
    exit 2
}

# Sets `python`: $MEGARL_PYTHON, else the checkout's .venv, else python3 on PATH.
megarl_find_python() {
    if [ -n "${MEGARL_PYTHON:-}" ]; then
        python="$MEGARL_PYTHON"
    elif [ -x "$megarl_root/.venv/bin/python" ]; then
        python="$megarl_root/.venv/bin/python"
    else
        python="$(command -v python3)" || megarl_fail "there is no python3 here; run \`make venv\`"
    fi
    local missing
    missing="$(trap '' INT USR1; "$python" - <<'PYTHON'
from importlib.util import find_spec

modules = "torch megatron sglang transformers pydantic ruamel blake3".split()
print(", ".join(name for name in modules if find_spec(name) is None))
PYTHON
    )" || megarl_fail "$python does not run; set MEGARL_PYTHON, or run \`make venv\`"
    [ -z "$missing" ] || megarl_fail \
        "$python has no $missing; run \`make venv\` in $megarl_root, or set MEGARL_PYTHON"
}

# megarl_signal NAME [MESSAGE CODE]: for the launcher, if it runs beside this shell. Else this shell
# ends, or (no MESSAGE) keeps for the launcher that a stop was asked.
megarl_signal() {
    if [ -n "$!" ]; then
        signalled=1
        kill -s "$1" "$!" 2>/dev/null
    elif [ $# -gt 1 ]; then
        echo "$2" >&2
        exit "$3"
    else
        stop_asked=1
    fi
}

# Python must start with SIGUSR1 held, which would end it. Where `env` is too old (coreutils < 8.31)
# it is ignored until the launcher holds it, a tenth of a second later.
megarl_exec() {
    local -a hold=()
    trap '' USR1
    ! env --block-signal=USR1 true 2>/dev/null || hold=(env --block-signal=USR1)
    MEGARL_STOP_ASKED="$stop_asked" exec "${hold[@]}" "$@"
}

# Under Slurm this shell stays, passes signals on, and has a run that is not done started again.
megarl_run_in_job() {
    local code=0 signalled=1
    (megarl_exec "$@") &
    while [ -n "$signalled" ]; do # a signal ends `wait`, too
        signalled=""
        wait "$!"
        code=$?
    done
    if [ "$code" -eq 75 ]; then
        trap '' INT TERM USR1 # a job that is requeued is ended first
        if scontrol requeue "$SLURM_JOB_ID"; then
            echo "megarl: job $SLURM_JOB_ID is requeued" >&2
        else
            echo "megarl: job $SLURM_JOB_ID is not requeued; submit the same command again" >&2
        fi
    fi
    exit "$code"
}

# megarl_launch MODULE RECIPE [key=value …] [--replay RUN@N | --only PART [--from RUN]] [--dry-run]:
# starts torchrun, under Slurm beside this shell and else in its place.
megarl_launch() {
    local module="$1" dry_run="" recipe="" stop_asked="" argument python ranks
    local -a settings=() modes=() command
    shift
    while [ $# -gt 0 ]; do
        argument="$1"
        shift
        case "$argument" in
            --dry-run) dry_run=1 ;;
            -h | --help) megarl_usage && exit 0 ;;
            --replay=* | --only=* | --from=*) modes+=("$argument") ;;
            --replay | --only | --from)
                [ $# -gt 0 ] || megarl_fail "$argument needs a value; see python -m megarl.train --help"
                modes+=("$argument=$1") && shift ;;
            -*) megarl_fail "unknown option $argument; options are --dry-run, --help, --replay," \
                "--only and --from" ;;
            *=*) settings+=("$argument") ;;
            *) [ -z "$recipe" ] || megarl_fail "one recipe at a time: $recipe or $argument"
                recipe="$argument" ;;
        esac
    done
    [ -n "$recipe" ] || { megarl_usage >&2; exit 2; }
    # Signals are for this shell alone until the launcher takes over: Python would show a traceback.
    trap 'megarl_signal INT "megarl: interrupted" 130' INT
    trap 'megarl_signal TERM "megarl: ended by SIGTERM" 143' TERM
    trap 'megarl_signal USR1' USR1
    megarl_find_python
    export PYTHONPATH="$megarl_root${PYTHONPATH:+:$PYTHONPATH}"
    # One thread per rank: measured best here, and torchrun would print a notice about it otherwise.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    ranks="$(trap '' INT USR1; "$python" -m megarl.recipe "$recipe" "${settings[@]}" --get world.ranks)" ||
        exit $?
    command=("$python" -m megarl.launcher "$ranks" "$module" "$recipe" "${settings[@]}" "${modes[@]}")
    if [ -n "$dry_run" ]; then
        printf 'OMP_NUM_THREADS=%s PYTHONPATH=%q' "$OMP_NUM_THREADS" "$PYTHONPATH"
        printf ' %q' "${command[@]}"
        printf '\n'
        exit 0
    fi
    [ -z "${SLURM_JOB_ID:-}" ] || megarl_run_in_job "${command[@]}"
    megarl_exec "${command[@]}"
}
