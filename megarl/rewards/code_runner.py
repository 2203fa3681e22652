"""What runs inside a sandbox as its first process: runs one program on one case at a time.

It is sent there as compiled code and imports nothing of this package. It trusts no byte of the
program: every case runs in a fork that has neither of the two pipes to the scorer, as another user
where the runner is root. The fork compiles the program too, since a compiler can be made to crash.
After a case every process of the sandbox but this one is killed.

Frames in: 4-byte length, marshal. First the settings, then cases. Frames out: `READY`, then for
each case `ANSWER` and the two texts that it gives the lengths of. Before it, an `ANSWER` that is
`LATE` asks how many seconds more a case gets; a frame with the number follows.
"""

import _signal  # `signal` takes half as long to import as all else
import atexit
import builtins
import gc
import marshal
import os
import resource
import select
import struct
import sys
import time

ANSWER = struct.Struct("<BidII")
"""How the case ended, exit code or signal, seconds, bytes of its output, bytes of its result."""

READY = b"ready\n"
EXITED, SIGNALLED, TIME, OUTPUT, FILES, LATE = range(6)
"""Ended by itself, by a signal; killed for its wall time, its output, the number of its files; not
ended in its time."""

STARTED = b"+"
"""First byte of every result: the fork is confined, what follows is the program's doing."""

RETURNED, RAISED, NO_FUNCTION, NOT_JSON = b"=", b"!", b"?", b"~"
"""What comes next, after the case's key: a value as JSON, an error's name, nothing, nothing."""

TICK_SECONDS = 0.02
MOST_FILES = 10_000
MOST_OPEN = 128


def main() -> None:
    # The first process of a namespace gets no signal from within that it has no handler for.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    settings = read_frame(requests)
    encode = None
    if settings["function"]:
        import json  # costs as much as the interpreter's start, so before the forks

        encode = json.JSONEncoder(ensure_ascii=True).encode
    gc.freeze()  # forks need not look through what is here
    write(answers, READY)

    def ask(seconds: float):
        write(answers, ANSWER.pack(LATE, 0, seconds, 0, 0))
        return read_frame(requests)

    while (case := read_frame(requests)) is not None:
        write(answers, run(settings, case, encode, nothing, ask))


def read_frame(file: int):
    """The next frame; None at the end."""
    header = read(file, 4)
    return marshal.loads(read(file, int.from_bytes(header, "little"))) if header else None


def read(file: int, count: int) -> bytes:
    parts = []
    while count and (part := os.read(file, min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def run(settings, case, encode, nothing: int, ask) -> bytes:
    """One case in a fork; the answer's frame."""
    source, feed = os.pipe()
    output, output_end = os.pipe()
    result, result_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(source, 0)
        os.dup2(nothing if settings["function"] else output_end, 1)
        os.dup2(nothing, 2)
        os.dup2(result_end, 3)
        os.closerange(4, 256)
        confine(settings)
        write(3, STARTED)
        play(settings["program"], settings["function"], case, encode)
    for file in (source, output_end, result_end):
        os.close(file)
    os.set_blocking(feed, False)
    # The case's time begins here: until then, the fork may wait for a busy machine.
    texts = {output: bytearray(), result: bytearray(os.read(result, 1))}
    most, seconds = settings["most_output"], min(settings["seconds"], case["seconds"])
    began = time.monotonic()
    how = watch(pid, feed, case["input"], texts, most, seconds, ask)
    seconds = time.monotonic() - began
    status = kill_all(pid)
    for file, text in texts.items():
        while len(text) <= most and (part := os.read(file, 1 << 16)):
            text += part
        os.close(file)
    if how == EXITED and max(map(len, texts.values())) > most:
        how = OUTPUT
    code = os.waitstatus_to_exitcode(status)
    if how == EXITED and code < 0:
        how, code = SIGNALLED, -code
    shown = [bytes(texts[file][:most]) for file in (output, result)]
    return ANSWER.pack(how, code, seconds, *map(len, shown)) + b"".join(shown)


def watch(pid: int, feed: int, text: bytes, texts, most: int, seconds: float, ask) -> int:
    """Write what the case reads and read what it writes, until its process ends or has to be.

    `ask` is told the seconds that went by, and tells how many more there are.
    """
    began = time.monotonic()
    deadline = began + seconds
    process = os.pidfd_open(pid)
    poller = select.poll()
    for file in (process, *texts):
        poller.register(file, select.POLLIN)
    poller.register(feed, select.POLLOUT)
    rest = memoryview(text)
    try:
        while True:
            # When time is up it is still seen whether the process ended before this one had a CPU.
            left = max(0.0, deadline - time.monotonic())
            ready = [file for file, _ in poller.poll(min(left, TICK_SECONDS) * 1000)]
            if feed in ready:
                rest = rest[feed_some(feed, rest) :]
                if not rest:
                    poller.unregister(feed)
                    os.close(feed)
                    feed = -1
            for file in texts.keys() & ready:
                part = os.read(file, 1 << 16)
                texts[file] += part
                if not part:
                    poller.unregister(file)
                if len(texts[file]) > most:
                    return OUTPUT
            if process in ready:
                return EXITED
            disk = os.statvfs("/tmp")
            if disk.f_files - disk.f_ffree > MOST_FILES:
                return FILES
            if not left:
                more = ask(time.monotonic() - began)
                if not more:
                    return TIME
                deadline = time.monotonic() + more
    finally:
        os.close(process)
        if feed >= 0:
            os.close(feed)


def feed_some(feed: int, rest) -> int:
    """Bytes that are done with: written, or all of them where nobody reads any more."""
    try:
        return os.write(feed, rest) if rest else 0
    except BrokenPipeError:
        return len(rest)


def kill_all(wanted: int) -> int:
    """End every other process of the sandbox; the wait status of `wanted`."""
    found = 0
    while True:
        kill_others()
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return found
        if pid == wanted:
            found = status


def kill_others() -> None:
    try:
        os.kill(-1, _signal.SIGKILL)
    except ProcessLookupError:
        return  # none runs


def confine(settings) -> None:
    """In the fork: another user where there is one, and the limits of a process."""
    if settings["uid"]:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MOST_OPEN,
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_DATA: settings["memory"],  # a scoring worker's own would hold instead
        resource.RLIMIT_FSIZE: settings["file"],
        resource.RLIMIT_NPROC: settings["processes"],
    }
    for limit, value in limits.items():
        # Where a limit is already lower than asked for, it stays.
        highest = resource.getrlimit(limit)[1]
        value = value if highest < 0 else min(value, highest)
        resource.setrlimit(limit, (value, value))
    # The first signal ends a program that does not handle it; the second cannot be handled.
    resource.setrlimit(resource.RLIMIT_CPU, (settings["cpu"], settings["cpu"] + 1))
    os.chdir("/tmp")


def clear_folder() -> None:
    """Remove what the program left there on an earlier case. What cannot be is its own failure."""
    if left := os.listdir():
        import shutil

        for name in left:
            is_folder = os.path.isdir(name) and not os.path.islink(name)
            (shutil.rmtree if is_folder else os.unlink)(name)


def end_script(module, code) -> None:
    """End the process as an interpreter ends a script: wait for threads, run what is registered,
    let go of its objects, write buffers. Tearing down the whole interpreter costs ten times that.
    """
    if threading := sys.modules.get("threading"):
        threading._shutdown()
    atexit._run_exitfuncs()
    module.__dict__.clear()
    gc.collect()
    for stream in {sys.stdout, sys.__stdout__} - {None}:
        if not stream.closed:
            stream.flush()
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


def find_function(names, function: str):
    """The program's function, or the method of its class `Solution` that is called so; or None."""
    if function in names:
        return names[function]
    made_by = names.get("Solution")
    known = isinstance(made_by, type) and hasattr(made_by, function)
    return getattr(made_by(), function) if known else None


def play(program: str, function: str, case, encode) -> None:
    """Run the program as a script, or import it and call the function. Its result goes to file 3.

    Whatever is needed after the program had its turn is held in local names.
    """
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    me, key, getpid, leave, send, kind = os.getpid(), case["key"], os.getpid, os._exit, write, type
    find, name = find_function, "solution" if function else "__main__"
    module = kind(sys)(name)
    sys.modules[name] = module
    sys.argv[:] = ["program.py"]
    # The interpreter was started without `site`, which gives these two to scripts.
    builtins.exit = builtins.quit = sys.exit
    try:
        clear_folder()
        exec(compile(program, "program.py", "exec"), module.__dict__)
        if not function:
            end_script(module, 0)
        called = find(module.__dict__, function)
        if called is None:
            told = NO_FUNCTION
        else:
            value = called(*case["args"], **case["kwargs"])
            try:
                told = RETURNED + encode(value).encode()
            except (TypeError, ValueError, RecursionError):
                told = NOT_JSON
    except BaseException as error:
        if not function and kind(error) is SystemExit:
            end_script(module, error.code)
        told = RAISED + kind(error).__name__.encode("ascii", "replace")
    if getpid() != me:
        leave(0)  # a fork that the program let go on
    send(3, key + told)
    if function:
        leave(0)
    sys.exit(1)
