#!/bin/bash
#SBATCH --job-name=megarl --nodes=1 --exclusive
''':' # Bash runs from here to the quotes; Python (torchrun runs this file with it) reads a string.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
megarl_launch megarl.train "$@"
exit
'''
import pathlib, runpy, sys
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
runpy.run_module("megarl.train", run_name="__main__", alter_sys=True)
# ' ends the string that bash, were it to read on, would see open
