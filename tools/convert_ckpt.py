"""Convert model folders between formats: `python tools/convert_ckpt.py --help`."""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# What optional packages of libraries are not installed says nothing to a person who converts.
warnings.filterwarnings("ignore", module=r"megatron\.")

from megarl.convert.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
