"""Convert model folders between formats: `python tools/convert_ckpt.py --help`."""

import signal
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# What optional packages of libraries are not installed says nothing to a person who converts.
warnings.filterwarnings("ignore", module=r"megatron\.")

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Importing takes seconds, and Ctrl-C in them needs no traceback; `main` has its own way.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from megarl.convert.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
