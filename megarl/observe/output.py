"""Standard output of a command that prints a page for people."""

from __future__ import annotations

import os
import sys


def prepare_output() -> None:
    """A character that the output's encoding lacks is escaped, not an error."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def close_output() -> None:
    """The reader went away (`| head`): nothing more can be said, and that is no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
