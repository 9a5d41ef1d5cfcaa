"""Processes and their threads as /proc shows them, under any root, each read as one picture of one process.

Formats: proc_pid_stat(5), proc_pid_status(5), proc_pid_cmdline(5). Everything about a process is
read through one descriptor of its directory, which the kernel ties to that process: a pid that is given to a new
process meanwhile cannot slip into the picture.
"""

import contextlib
import functools
import os
import re
from dataclasses import dataclass, replace
from typing import Final

from berth.errors import MalformedError
from berth.host import proc_files
from berth.host.cpuset import CpuSet
from berth.host.proc_files import GONE, decode, hidepid, naming, open_directory, read_at, read_pages_by_node, stat_at
from berth.linux import process as linux
from berth.linux.process import StatLine, all_pids, parse_status

__all__ = [
    "MAX_PASSES",
    "PF_NO_SETAFFINITY",
    "POLICIES",
    "ProcessFacts",
    "ThreadFacts",
    "clock_ticks_per_second",
    "hidepid",
    "list_pids",
    "read_environment",
    "read_pages_by_node",
    "read_process",
]

#: Passes over the threads, and readings of a process that executes another program meanwhile, before giving up.
#: hwloc-bind(1) tries its threads as often.
MAX_PASSES: Final = 10
#: linux/sched.h: the kernel refuses to change the mask of such a thread.
PF_NO_SETAFFINITY: Final = 0x04000000
#: Scheduling policies, linux/sched.h.
POLICIES: Final = {
    0: "SCHED_OTHER",
    1: "SCHED_FIFO",
    2: "SCHED_RR",
    3: "SCHED_BATCH",
    5: "SCHED_IDLE",
    6: "SCHED_DEADLINE",
    7: "SCHED_EXT",
}
#: What is taken from the status file of a thread; parsing all of it would double the time that a snapshot takes.
_THREAD_KEYS: Final = re.compile(
    r"^((?:Cpus_allowed|Mems_allowed)(?:_list)?|(?:non)?voluntary_ctxt_switches):[ \t]*(.*)$", re.MULTILINE
)
#: More fields of the stat file by their number in proc_pid_stat(5).
_USER, _SYSTEM, _START_CODE, _CPU, _POLICY, _ARG_START, _ARG_END = 14, 15, 26, 39, 41, 48, 49


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFacts:
    """One thread.

    Attributes:
        start_ticks: Clock ticks between boot and its start.
        name: At most 15 bytes, but for the kernel's own threads.
        state: One letter of proc_pid_stat(5).
        cpus_allowed: CPUs its mask allows, already cut to its cpuset.
        mems_allowed: NUMA nodes its cpuset allows; None where the kernel does not say.
        current_cpu: CPU it ran on last; None where the kernel does not say.
        policy: Scheduling policy, a key of `POLICIES`.
        flags: PF_ flags of linux/sched.h.
        user_ticks: Clock ticks of user time so far, see `clock_ticks_per_second`.
        system_ticks: Clock ticks of system time so far.
        voluntary_ctxt_switches: Times it gave up its CPU; None where the kernel does not say.
        nonvoluntary_ctxt_switches: Times its CPU was taken from it; None where the kernel does not say.
    """

    tid: int
    start_ticks: int
    name: str
    state: str
    cpus_allowed: CpuSet
    mems_allowed: CpuSet | None
    current_cpu: int | None
    policy: int
    flags: int
    user_ticks: int
    system_ticks: int
    voluntary_ctxt_switches: int | None
    nonvoluntary_ctxt_switches: int | None

    @property
    def movable(self) -> bool:
        """Whether the kernel lets its mask be changed."""
        return not self.flags & PF_NO_SETAFFINITY

    @property
    def policy_name(self) -> str:
        """Name of the policy, or its number where it is not known."""
        return POLICIES.get(self.policy, str(self.policy))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """One process with its threads.

    Attributes:
        uid: Real user id.
        comm: Name of its first thread.
        arguments: The command line; empty for a kernel thread and for a zombie.
        state: Letter of its first thread, which may be a zombie (`Z`) while others run.
        start_ticks: Clock ticks between boot and its start.
        nspid_chain: Its pid in each pid namespace, that of /proc first; empty where the kernel does not say.
        kernel_thread: Whether it is one of the kernel's own.
        cap_effective: Effective capabilities, bit N for capability N of capabilities(7); None where not said.
        threads: All threads, by tid.
        settled: Whether the last pass found no new thread and the program stayed the same; if not, there may be more.
    """

    pid: int
    ppid: int
    uid: int
    comm: str
    arguments: tuple[str, ...]
    state: str
    start_ticks: int
    nspid_chain: tuple[int, ...]
    kernel_thread: bool
    cap_effective: int | None
    threads: tuple[ThreadFacts, ...]
    settled: bool

    @property
    def main(self) -> ThreadFacts | None:
        """The first thread, not always the lowest tid: numbers wrap. None where it ended while it was read."""
        return next((thread for thread in self.threads if thread.tid == self.pid), None)


def clock_ticks_per_second() -> int:
    """Return the unit of all times in ticks, per second: USER_HZ, which is part of the kernel's interface."""
    return os.sysconf("SC_CLK_TCK")


def list_pids(root: str = "/") -> list[int]:
    """Return the pid of every process that /proc shows to this user, ascending.

    Raises:
        OSError: /proc is not there.
    """
    return all_pids(root)


def read_process(pid: int, root: str = "/") -> ProcessFacts:
    """Return what /proc tells about one process and all its threads.

    The threads are listed again until no new one is found. The process is read again if it executes another program
    meanwhile, so that its arguments and its name belong together.

    Raises:
        ForbiddenError: `no-such-process`: it has ended, is hidden by the hidepid option of /proc, or is a thread.
        MalformedError: A file does not hold what the kernel documents; the message names the file.
        OSError: A file is there and cannot be read.
    """
    try:
        with open_directory(os.path.join(root, "proc", str(pid))) as directory:
            for _ in range(MAX_PASSES):
                before, after, facts = _read_once(directory, pid)
                if before.number(linux.START) != after.number(linux.START):
                    raise ProcessLookupError
                if _program(before) == _program(after):
                    return facts
            return replace(facts, settled=False)
    except PermissionError as error:
        raise proc_files.hidden(pid, hidepid(root)) from error
    except GONE as error:
        raise proc_files.gone(pid, hidepid(root)) from error


def read_environment(pid: int, root: str = "/") -> dict[str, str] | None:
    """Return the environment a process was started with, the first of equal names as getenv(3) takes it.

    Returns:
        The variables; None where they may not be read: another user's process, a zombie, or one that has ended.
    """
    data = linux.read_environ(pid, root)
    if data is None:
        return None
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals:
            found.setdefault(decode(name), decode(value))
    return found


def _read_once(directory: int, pid: int) -> tuple[StatLine, StatLine, ProcessFacts]:
    """Return the facts, between the stat lines from before and after they were read."""
    before = stat_at(directory, f"/proc/{pid}/stat")
    status = parse_status(decode(read_at(directory, "status")))
    line = read_at(directory, "cmdline")
    arguments = line.removesuffix(b"\0").split(b"\0") if line else []
    threads, settled = _read_threads(directory, pid)
    after = stat_at(directory, f"/proc/{pid}/stat")
    with naming(f"/proc/{pid}/status"):
        if int(status.get("Tgid", pid)) != pid:
            raise proc_files.is_thread(pid, int(status["Tgid"]))
        facts = ProcessFacts(
            pid=pid,
            ppid=after.number(linux.PARENT),
            uid=int(status["Uid"].split()[0]),
            comm=decode(after.name),
            arguments=tuple(map(decode, arguments)),
            state=after.text(linux.STATE),
            start_ticks=after.number(linux.START),
            nspid_chain=tuple(int(number) for number in status.get("NSpid", "").split()),
            kernel_thread=bool(after.number(linux.FLAGS) & linux.PF_KTHREAD),
            cap_effective=int(status["CapEff"], 16) if "CapEff" in status else None,
            threads=threads,
            settled=settled,
        )
    return before, after, facts


def _read_threads(directory: int, pid: int) -> tuple[tuple[ThreadFacts, ...], bool]:
    """Return the threads of the last pass, and whether it found none that the pass before had not."""
    known: dict[int, ThreadFacts] = {}
    with open_directory("task", directory) as tasks:
        for _ in range(MAX_PASSES):
            listed = sorted(int(name) for name in os.listdir(tasks))
            new = [tid for tid in listed if tid not in known]
            if not new:
                break
            for tid in new:
                with contextlib.suppress(*GONE):  # It ended after it was listed.
                    known[tid] = _read_thread(tasks, pid, tid)
    if not listed:
        raise ProcessLookupError
    return tuple(known[tid] for tid in listed if tid in known), not new


def _read_thread(tasks: int, pid: int, tid: int) -> ThreadFacts:
    place = f"/proc/{pid}/task/{tid}"
    with open_directory(str(tid), tasks) as directory:
        status = dict(_THREAD_KEYS.findall(decode(read_at(directory, "status"))))
        line = stat_at(directory, f"{place}/stat")
    with naming(f"{place}/status"):
        return ThreadFacts(
            tid=tid,
            start_ticks=line.number(linux.START),
            name=decode(line.name),
            state=line.text(linux.STATE),
            cpus_allowed=_allowed(status, "Cpus_allowed", f"{place}/status"),
            mems_allowed=_mems_allowed(status, f"{place}/status"),
            current_cpu=line.number(_CPU),
            policy=line.number(_POLICY),
            flags=line.number(linux.FLAGS),
            user_ticks=line.number(_USER),
            system_ticks=line.number(_SYSTEM),
            voluntary_ctxt_switches=_count(status, "voluntary_ctxt_switches"),
            nonvoluntary_ctxt_switches=_count(status, "nonvoluntary_ctxt_switches"),
        )


def _allowed(status: dict[str, str], key: str, source: str) -> CpuSet:
    """Return the set of a mask; kernels before 2.6.26 print no list of it."""
    listed = status.get(f"{key}_list")
    return CpuSet.parse_mask(status[key], source=source) if listed is None else _parse_list(listed, source)


def _parse_list(text: str, source: str) -> CpuSet:
    """Return the set of a list; nearly all threads of a machine share a few."""
    try:
        return _parse_known(text)
    except MalformedError:
        return CpuSet.parse_list(text, source=source)


@functools.lru_cache(maxsize=256)
def _parse_known(text: str) -> CpuSet:
    return CpuSet.parse_list(text)


def _mems_allowed(status: dict[str, str], source: str) -> CpuSet | None:
    known = not status.keys().isdisjoint(("Mems_allowed", "Mems_allowed_list"))
    return _allowed(status, "Mems_allowed", source) if known else None


def _count(status: dict[str, str], key: str) -> int | None:
    return int(status[key]) if key in status else None


def _program(line: StatLine) -> tuple[bool, list[bytes]]:
    """Return what changes when a process ends or executes another program; fields of other users are all the same."""
    addresses = [line.after[field - 3] for field in (_START_CODE, _ARG_START, _ARG_END) if field - 3 < len(line.after)]
    return line.text(linux.STATE) in linux.DEAD_STATES, addresses
