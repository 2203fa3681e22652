"""The keeper of a pool's processes: `python -m megarl.rewards.keeper`, started by `processes.py`.

Three kinds of processes. The keeper runs no foreign code and has one thread. The template is its
fork; it loads the scorers, once, and then does nothing but fork workers, which takes milliseconds.
A worker is a fork of the template whose parent is the keeper: it can be killed at any time, and
whatever it started, daemons too, comes to the keeper when it ends and is killed as well.

A process cannot be forked safely when it has threads, open sockets or children. Where loading the
scorers leaves some, there is no template: each worker is a fork of the keeper and loads them
itself. (multiprocessing would import the training script, torch and SGLang, into every worker.)

The keeper ends, and with it all others, when the rank closes its socket or ends in any way.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

from megarl.rewards.frames import Channel, End, Ended, Ready, Setup, Start, Started, say
from megarl.rewards.limits import adopt_orphans, children_of
from megarl.rewards.sources import changed
from megarl.rewards.template import be_template, load_and_work, never_return, no_process

SWEEP_SECONDS = 30.0
"""How long processes may start others faster than they are killed before the keeper gives up."""


class _TemplateEnded(Exception):
    """The template is gone: a scorer ended it, or its loading did."""


class _Keeper:
    def __init__(self, control: Channel, rank: int) -> None:
        self._control, self._pid = control, os.getpid()
        self._rank = os.pidfd_open(rank)
        self._setup: Setup | None = None
        self._ready: Ready | None = None
        self._template: tuple[int, Channel] | None = None
        self._workers: set[int] = set()

    def run(self) -> None:
        """Serve the rank until it is gone (`EOFError`, `BrokenPipeError`)."""
        self._setup = self._control.receive(watched=self._rank)
        try:
            answer = self._load()
        except OSError as error:
            answer = no_process(error)
        self._control.send(answer)
        while True:
            match self._control.receive(watched=self._rank):
                case Start():
                    self._start(self._control.descriptors.pop(0))
                case End(pid=pid):
                    self._control.send(Ended(self._end(pid)))

    def end_all(self) -> None:
        for pid in list(self._workers):
            self._end(pid)
        if self._template is not None:
            self._drop_template()
        self._sweep()

    def _load(self, *descriptors: int) -> Ready | str:
        """Start a template and wait for its scorers; a `str` says why it has none. It does not keep
        the keeper's `descriptors`. Raises `OSError` when there can be no process."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._control.close()
            for inherited in (self._rank, *descriptors):
                os.close(inherited)
            never_return(be_template, Channel(theirs), self._setup, self._pid)
        theirs.close()
        self._template = pid, Channel(ours)
        try:
            ready = self._hear_template()
        except _TemplateEnded:
            self._drop_template()
            return (
                f"reward.scorers: a worker ended while loading {self._setup.names}; see its error "
                "above"
            )
        if isinstance(ready, Ready) and not ready.unsafe and self._strays():
            # Daemons: they are children of the keeper, not of the template.
            ready = Ready(ready.sources, ready.takes, ready.flows, "child processes")
        if isinstance(ready, str) or ready.unsafe:
            self._drop_template()
            self._sweep()
        self._ready = ready if isinstance(ready, Ready) else None
        return ready

    def _hear_template(self) -> Ready | Started | str:
        """The template's next frame; raises `EOFError` when the rank is gone meanwhile."""
        _, channel = self._template
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        poller.register(self._rank, select.POLLIN)
        poller.register(self._control, 0)  # told of its end alone: requests may wait
        while (value := channel.take()) is None:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if ready - {channel.fileno()}:
                raise EOFError
            try:
                channel.read()
            except EOFError:
                raise _TemplateEnded from None
        return value

    def _drop_template(self) -> None:
        pid, channel = self._template
        self._template = None
        channel.close()
        _kill_group(pid)
        os.waitpid(pid, 0)

    def _start(self, descriptor: int) -> None:
        """Start a worker that talks over `descriptor`, and say so to the rank."""
        try:
            pid = self._fork_worker(descriptor) if self._ready.unsafe else self._ask(descriptor)
        except OSError as error:
            pid = no_process(error)
        os.close(descriptor)
        if isinstance(pid, str):
            self._control.send(pid)
            return
        self._workers.add(pid)
        try:
            watch = os.pidfd_open(pid)
        except OSError as error:  # no descriptor is left; the worker ends with the keeper
            self._control.send(no_process(error))
            return
        self._control.send(Started(pid), watch)
        os.close(watch)

    def _ask(self, descriptor: int) -> int | str:
        """The pid of a worker forked by the template; by another one where it was ended. A `str`
        says why there is none; raises `OSError` when there can be no process."""
        for _ in range(2):
            if self._template is not None:
                try:
                    self._template[1].send(Start(), descriptor)
                    answer = self._hear_template()
                    return answer.pid if isinstance(answer, Started) else answer
                except (_TemplateEnded, BrokenPipeError, ConnectionResetError):
                    self._drop_template()
            before = self._ready
            ready = self._load(descriptor)
            if isinstance(ready, str):
                return ready
            if ready.sources != before.sources:
                return changed(before.sources, ready.sources)
            if ready.unsafe:
                return self._fork_worker(descriptor)
        return "reward.scorers: the process that holds the loaded scorers ended twice; see above"

    def _fork_worker(self, descriptor: int) -> int:
        pid = os.fork()
        if pid == 0:
            self._control.close()
            os.close(self._rank)
            never_return(load_and_work, descriptor, self._setup, self._pid)
        return pid

    def _end(self, pid: int) -> int:
        """Kill a worker with all that descends from it; its exit code."""
        _kill_group(pid)
        _, status = os.waitpid(pid, 0)
        self._workers.discard(pid)
        self._sweep()
        return os.waitstatus_to_exitcode(status)

    def _strays(self) -> list[int]:
        """Children that are neither workers nor the template: what ended workers left behind."""
        kept = self._workers | ({self._template[0]} if self._template else set())
        return [pid for pid in children_of(self._pid) if pid not in kept]

    def _sweep(self) -> None:
        """Kill what ended workers left behind; their children come here in turn."""
        until = time.monotonic() + SWEEP_SECONDS
        while strays := self._strays():
            for pid in strays:
                _kill_tree(pid)
            ended = [os.waitpid(pid, os.WNOHANG)[0] for pid in strays]
            if not any(ended):
                time.sleep(0.001)
            if time.monotonic() > until:
                raise RuntimeError(
                    f"{len(strays)} processes that scorers started could not be ended"
                )


def _kill_group(pid: int) -> None:
    """Kill a child that leads a group, and the group, at once: none of it can fork meanwhile."""
    with suppress(ProcessLookupError):  # it has not made its group yet
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_tree(pid: int) -> None:
    """Kill a stray, its group and what descends from it; parents first."""
    rest = [pid]
    while rest:
        pid = rest.pop()
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
        rest += children_of(pid)


def main(descriptor: int, rank: int) -> None:
    adopt_orphans()
    if os.getppid() != rank:
        return
    keeper = _Keeper(Channel(socket.socket(fileno=descriptor)), rank)
    try:
        keeper.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except RuntimeError as error:
        say(f"reward.scorers: {error}")
    finally:
        keeper.end_all()


if __name__ == "__main__":
    # Classes pickled by name must be those of the importable module, not of `__main__`.
    from megarl.rewards.keeper import main as imported_main

    imported_main(int(sys.argv[1]), int(sys.argv[2]))
