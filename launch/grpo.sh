#!/bin/bash
#SBATCH --job-name=megarl --nodes=1 --ntasks-per-node=1
#SBATCH --requeue --signal=B:USR1@120 --open-mode=append
''':' # Bash runs from here to the quotes; Python (torchrun runs this file with it) reads a string.
here="$(dirname "${BASH_SOURCE[0]}")"
# sbatch runs a copy of this file in a spool folder, but the job knows where it was.
[ -f "$here/env.sh" ] || here="$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=||p')"
source "${here%%/grpo.sh*}/env.sh" || exit 2
megarl_script=launch/grpo.sh megarl_launch megarl.train "$@"
exit
'''
import pathlib, runpy, sys
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
runpy.run_module("megarl.train", run_name="__main__", alter_sys=True)
# ' ends the string that bash, were it to read on, would see open
