"""The network lab's namespaces: their names, the commands that make them, and their removal."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAME = re.compile(r"onebit-(\d+)-(\d+)-\d+-(?:bridge|host\d+)")  # owner's pid, its start time, serial, role

# `ip netns` writes below /run/netns, which is root's; where nobody has made it, all of /run is a new one
PLACE = 'place=/run/netns; [ -d $place ] || place=/run; mount -t tmpfs tmpfs $place; exec "$@"'
AS_ROOT = ("unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-ec", PLACE)

_serial = itertools.count()


class LabUnavailable(RuntimeError):
    """This machine cannot hold a network lab; the message says what is missing and what to do."""


def check_available() -> None:
    """LabUnavailable unless this is Linux, with `ip` and `tc`, and we are root: what else is missing, these say."""
    if sys.platform != "linux":
        raise LabUnavailable(f"the network lab needs Linux, not {sys.platform}: run it there, as root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LabUnavailable(f"the network lab finds no {' and no '.join(missing)} on PATH: install iproute2")
    if os.geteuid():
        raise LabUnavailable(
            "the network lab makes network namespaces: run it as root, or where users may make user namespaces "
            "(unshare -Urn true); --paced needs neither, for two hosts"
        )


def enter_user_namespace() -> None:
    """Start this command again as root of a user namespace of its own, unless it is root or may not have one."""
    if sys.platform == "linux" and os.geteuid() and allows_user_namespaces():
        os.execvp(AS_ROOT[0], [*AS_ROOT, "sh", sys.executable, *sys.orig_argv[1:]])


def allows_network_namespaces() -> bool:
    """Tell whether root may make networks and mounts here; in a container it may not."""
    return subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode == 0


def allows_user_namespaces() -> bool:
    """Tell whether this user may be root of a namespace, with networks and mounts of its own."""
    if shutil.which(AS_ROOT[0]) is None:
        return False
    return subprocess.run([*AS_ROOT, "sh", "true"], capture_output=True).returncode == 0


def execute(*argv: str, lines: Sequence[str] = ()) -> str:
    """Output of a command fed with lines; in a session of its own, so that Ctrl-C does not cut it short."""
    text, shown = "".join(f"{line}\n" for line in lines), " ".join(argv)
    done: subprocess.CompletedProcess[str]
    options: Any = {"text": True, "timeout": 30, "capture_output": True, "start_new_session": True}
    try:
        for _ in range(10):
            done = subprocess.run(argv, input=text, **options)
            if done.returncode >= 0:  # else a Ctrl-C came before it had its session: it has done nothing yet
                break
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"`{shown}` did not end in 30 s") from None
    if done.returncode:
        raise RuntimeError(f"`{shown}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def new_prefix() -> str:
    """A prefix for the names of one more lab of this process."""
    return f"onebit-{os.getpid()}-{_start_time(os.getpid())}-{next(_serial)}"


def signal_all(namespaces: Sequence[str], number: int) -> None:
    """Signal every process in these namespaces: they are ours by construction."""
    for name in namespaces:
        with contextlib.suppress(RuntimeError):  # no such namespace
            for pid in execute("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)


def _namespaces() -> list[str]:
    names = (line.split()[0] for line in execute("ip", "netns", "list").splitlines() if line)
    return [name for name in names if NAME.fullmatch(name)]


def remove(namespaces: Sequence[str]) -> None:
    signal_all(namespaces, signal.SIGKILL)
    for name in namespaces:
        with contextlib.suppress(RuntimeError):  # no such namespace
            execute("ip", "netns", "del", name)
    left = sorted(set(namespaces) & set(_namespaces()))
    if left:
        raise RuntimeError(f"network namespaces {left} could not be removed: run `ip netns del` on each")


def _start_time(pid: int) -> str | None:
    """A process's start time, which distinguishes it from a later one with its pid; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def sweep_stale() -> list[str]:
    """Remove the namespaces of labs whose process is gone (killed by SIGKILL); return their names."""
    matches = [match for match in map(NAME.fullmatch, _namespaces()) if match]
    stale = [match[0] for match in matches if _start_time(int(match[1])) != match[2]]
    remove(stale)
    return stale
