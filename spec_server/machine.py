"""What this machine offers, cores and memory, and how llama's workers behave on it; starts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_GIB = 1 << 30


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads of one core counted once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def default_threads() -> int:
    """All physical cores, one less where there are more than two: the event loop needs one."""
    cores = physical_cores()
    return cores - 1 if cores > 2 else cores


def default_checkpoint_bytes() -> int:
    """A quarter of the memory free now, at most 2 GiB."""
    return min(available_bytes() // 4, 2 * _GIB)


def available_bytes() -> int:
    """What this process could allocate now: the machine's available memory, or less where a control group of it
    allows less. Pages of files count as available, for machine and group alike."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass
    return min([free, *_left_in_groups()])


def _left_in_groups(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """For this process's control group and those around it that have a limit, of either version."""
    try:
        lines = own.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            yield from _left_in(folder, *names)
            if folder == base:
                break


def _left_in(group: Path, limit: str, used: str) -> list[int]:
    """One number; none where the group is not there or has no limit."""
    try:
        n_limit, n_used = (int((group / name).read_text()) for name in (limit, used))  # "max": none
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        n_files = int(stat.get("file") or stat["total_cache"])
        n_kept = int(stat.get("total_shmem") or stat.get("shmem") or 0)  # a tmpfs's cannot be dropped
    except (OSError, ValueError, KeyError):
        return []
    return [max(0, n_limit - n_used + n_files - n_kept)]


_SPIN = "GOMP_SPINCOUNT"


def limit_spinning(count: int) -> None:
    """How long OpenMP workers spin at barriers; -1 leaves it to the environment and the runtime's default.

    Has an effect only before the native library is loaded.
    """
    if count >= 0:
        os.environ[_SPIN] = str(count)
