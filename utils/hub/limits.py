"""A seat's share of the machine, enforced by the kernel: a control group for each seat.

    limits = Limits()                                       # LimitsError
    group = limits.group("ada", memory=6 << 30, cores=2.0, processes=1024)
    subprocess.Popen(words, preexec_fn=group.enter)
    group.remove()                                          # when nothing in it runs any more

The groups are inside the hub's own, which must be writable for it: systemd delegates it with
`Delegate=yes`. Both versions of Linux's control groups are supported.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

TREES = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "cpu", "pids")
PERIOD = 100_000  # microseconds, in which a seat has `cores` times as much processor time
OWN = "hub"  # the group of the hub and its proxy: in version 2 a group with groups has no processes


class LimitsError(RuntimeError):
    """One sentence that names the problem and its fix."""


@dataclass(frozen=True)
class Group:
    """The control group of a seat. folders: {controller: folder}; version 2 has one for all."""

    folders: dict[str, Path]

    def enter(self) -> None:
        """Move the calling process, with all its future children, into the group."""
        for folder in set(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    def mounts(self) -> list[tuple[Path, Path]]:
        """(folder, its path in the seat): with these, the seat's programs see its limits."""
        if len(set(self.folders.values())) == 1:
            return [(self.folders["memory"], TREES)]
        return [(folder, TREES / name) for name, folder in self.folders.items()]

    def remove(self) -> None:
        """Remove the group unless something in it still runs."""
        for folder in set(self.folders.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()


class Limits:
    """Makes the groups of seats inside the group of this process. Raises LimitsError."""

    def __init__(self, trees: Path = TREES, groups: str | None = None) -> None:
        """trees, groups: where the trees are mounted, and the text of /proc/self/cgroup."""
        if groups is None:
            groups = Path("/proc/self/cgroup").read_text()
        found = dict(line.split(":", 2)[1:] for line in groups.splitlines())
        old = {part: (name, path) for name, path in found.items() for part in name.split(",")}
        self.version = 1 if all(name in old for name in CONTROLLERS) else 2
        if self.version == 1:
            self.folders = {
                name: trees / old[name][0] / old[name][1].strip("/") for name in CONTROLLERS
            }
            own = self.folders["memory"]
        else:
            own = trees / found.get("", "").strip("/")
            own = own.parent if own.name == OWN else own
            self.folders = dict.fromkeys(CONTROLLERS, own)
        try:
            if self.version == 2:
                self._hand_over(own)
            self.group("probe").remove()
        except OSError as error:
            raise LimitsError(
                f"A seat's memory and cores cannot be limited: {error.filename or own} cannot be "
                f"written ({error.strerror}); start the hub by systemd with Delegate=yes, or with "
                "--no-limits; docs/class/hub.md has both."
            ) from None

    def _hand_over(self, own: Path) -> None:
        """Move the group's processes one group down, so that the groups there can have controllers.

        This process is not always the only one: `make hub` waits for it.
        """
        (own / OWN).mkdir(exist_ok=True)
        for number in (own / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                (own / OWN / "cgroup.procs").write_text(number)
        wanted = " ".join(f"+{name}" for name in CONTROLLERS)
        (own / "cgroup.subtree_control").write_text(wanted)

    def group(
        self,
        name: str,
        memory: int | None = None,
        cores: float | None = None,
        processes: int | None = None,
    ) -> Group:
        """The group of a seat, made or updated with these limits; None: unlimited.

        memory: bytes, including shared memory and files in /tmp. processes: threads count too.
        Raises OSError.
        """
        folders = {part: folder / f"seat-{name}" for part, folder in self.folders.items()}
        for folder in set(folders.values()):
            folder.mkdir(exist_ok=True)
        quota = None if cores is None else int(cores * PERIOD)
        if self.version == 2:
            values = {
                "memory.max": "max" if memory is None else memory,
                "memory.swap.max": "max" if memory is None else 0,
                "cpu.max": f"{'max' if quota is None else quota} {PERIOD}",
                "cpu.weight": 10,  # the hub has 100: forty equal seats would starve it
            }
        else:
            values = {
                "memory.limit_in_bytes": -1 if memory is None else memory,
                "cpu.cfs_period_us": PERIOD,
                "cpu.cfs_quota_us": -1 if quota is None else quota,
                "cpu.shares": 102,  # of 1024, likewise
            }
        values["pids.max"] = "max" if processes is None else processes
        for file, value in values.items():
            path = folders[file.partition(".")[0]] / file
            if file != "memory.swap.max" or path.exists():  # a kernel without swap has no such file
                path.write_text(str(value))
        return Group(folders)
