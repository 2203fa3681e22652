"""Which users programs in sandboxes are, and whether limits of a user hold for each by itself."""

from __future__ import annotations

import os
import platform
from pathlib import Path

FIRST_UID, UIDS = 0x60000000, 0x10000000
"""Users for programs when root starts them: beyond all that accounts or containers use."""

COUNTED_SINCE = (5, 14)
"""From this Linux on, RLIMIT_NPROC counts the processes of a user namespace by themselves."""


def can_be_others() -> bool:
    """Whether this process is root and may be any user. Root of a container that is itself in a
    user namespace may not."""
    if os.getuid() != 0:
        return False
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(
        int(first) <= FIRST_UID and int(first) + int(count) >= FIRST_UID + UIDS
        for first, _, count in ranges
    )


def counts_by_namespace() -> bool:
    release = platform.release().split(".")
    return (int(release[0]), int(release[1].partition("-")[0])) >= COUNTED_SINCE
