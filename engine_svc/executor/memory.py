"""How much memory is free, for the machine and for the control groups that hold this process.

A limit of a control group holds for everything below it, so every group from the process's own up to the root is
looked at. Page cache that can be dropped counts as free. Knows versions 1 and 2 of the interface.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

GIB = 1 << 30
MAX_CPU_KV_CACHE = 4 * GIB

_CGROUP_LIST = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def free_memory(cgroup_list: Path = _CGROUP_LIST, cgroup_root: Path = _CGROUP_ROOT) -> int:
    """Bytes that this process can still take."""
    return min([int(psutil.virtual_memory().available), *_group_rooms(cgroup_list, cgroup_root)])


def cpu_kv_cache_memory(free: int) -> int:
    """Share of the free bytes that the KV cache takes unless told."""
    return min(MAX_CPU_KV_CACHE, free // 4)


def _group_rooms(cgroup_list: Path, cgroup_root: Path) -> Iterator[int]:
    """What is left in each control group that has a limit."""
    try:
        lines = cgroup_list.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders, names = _folders(cgroup_root, path), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folders = _folders(cgroup_root / "memory", path)
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for folder in folders:
            room = _room(folder, *names)
            if room is not None:
                yield room


def _folders(root: Path, path: str) -> Iterator[Path]:
    """The group's folder and its parents up to the root; only those that are seen from here."""
    folder = root / path.strip("/")
    while True:
        if folder.is_dir():
            yield folder
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _room(folder: Path, limit_name: str, usage_name: str, droppable_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - usage + int(stat.get(droppable_name, "0")))
