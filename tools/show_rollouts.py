"""Read a run's samples like a person: filters, groups side by side, statistics. See --help."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.audit.rollouts import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
