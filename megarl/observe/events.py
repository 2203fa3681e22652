"""TensorBoard event files of a run, cut back to an iteration: every event kept as it was written.

Read by TensorBoard's own reader, which checks each record's sums and ends at the first torn one.
The records that are kept are copied byte for byte, so that their wall times and sums stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.observe.metrics import TENSORBOARD_FOLDER

KEPT_FILE = "events.out.tfevents.0000000000.kept"
"""Holds what was kept. Its name comes before every writer's: TensorBoard reads files by name, and
one that is watching the folder has shown these events already and goes on with the next file."""
_NAMED = "tfevents"
_FRAME = 16
"""Bytes of a record besides its event: length, its sum, and the event's sum."""


@dataclass(frozen=True)
class CutEvents:
    """What a run's event files hold up to an iteration."""

    files: tuple[Path, ...]
    """Those that were read, in TensorBoard's order."""
    body: bytes
    """The kept records as one event file; empty where no event is kept."""
    dropped: int
    """Events of the iteration or a later one."""
    repeated: int
    """Events that are there twice, as after a cut that was interrupted."""
    unread_bytes: int
    """Behind a torn or broken record, in all files together."""

    @property
    def is_due(self) -> bool:
        """False for one file of which everything is kept: no state in the middle of a cut is that,
        so a cut that was interrupted is always taken up again."""
        odd = self.dropped or self.repeated or self.unread_bytes or not self.body
        return len(self.files) > 1 or (len(self.files) == 1 and bool(odd))


def cut_events(run_folder: Path, before: int) -> CutEvents:
    """The events of `run_folder` with a step below `before`. Writes nothing."""
    files = _event_files(run_folder / TENSORBOARD_FOLDER)
    if not files:
        return CutEvents((), b"", 0, 0, 0)
    # Not at the top: it takes 0.2 s, and a run without TensorBoard does not need it.
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    head, kept = b"", []
    seen: set[bytes] = set()
    dropped = repeated = unread = 0
    for path in files:
        body = path.read_bytes()
        at = 0
        for record in RawEventFileLoader(str(path)).Load():
            framed = body[at : at + _FRAME + len(record)]
            at += len(framed)
            event = Event.FromString(record)
            if event.HasField("file_version"):
                head = head or framed
            elif event.step >= before:
                dropped += 1
            elif record in seen:
                repeated += 1
            else:
                seen.add(record)
                kept.append(framed)
        unread += len(body) - at
    body = head + b"".join(kept) if kept else b""
    return CutEvents(tuple(files), body, dropped, repeated, unread)


def _event_files(folder: Path) -> list[Path]:
    """What TensorBoard takes for one: the word in its name, directly in the folder."""
    return sorted(path for path in folder.glob(f"*{_NAMED}*") if path.is_file())
