"""The NPUs of a snapshot: who uses which, and what is near them.

Four kinds of ids name a chip, and a process may be tied to one by its user, by its environment and by the driver's own
process table. Where these contradict each other nothing is chosen; the contradiction is the answer.
"""

from collections.abc import Callable, Iterable, Mapping

from berth.binding.snapshot import NpuDevice, Process, RankEntry, Snapshot
from berth.host.cpuset import CpuSet


class Npus:
    """The NPUs of one snapshot.

    Args:
        snapshot: The snapshot.
        nodes: CPUs of each NUMA node; empty where the nodes are not to be trusted.
        parse: Reads a CPU list.
    """

    def __init__(self, snapshot: Snapshot, nodes: Mapping[int, CpuSet], parse: Callable[[str], CpuSet]) -> None:
        self.devices = snapshot.npu_topology.devices
        self._mapping = snapshot.workload.rank_mapping
        self._nodes = nodes
        self._parse = parse
        self._numbered: dict[int, list[NpuDevice]] = {}
        for device in self.devices:
            self._numbered.setdefault(number_of(device), []).append(device)

    def mapped(self, pid: int) -> list[RankEntry]:
        """Return the entries of the rank map for a process."""
        return [entry for entry in self._mapping if entry.pid == pid]

    def users(self, process: Process) -> list[NpuDevice]:
        """Return the NPUs whose process table names the process, by its pid here or in the outermost namespace."""
        names = {process.pid, *process.nspid_chain[:1]}
        return [device for device in self.devices if not names.isdisjoint(device.host_pids)]

    def of(self, process: Process) -> tuple[tuple[NpuDevice, ...], str]:
        """Return the NPUs of a process, and how the sources contradict each other, where they do.

        The process table may also show contexts on NPUs that a process talks to, so what the user or the environment
        says holds if it is among them.
        """
        mapped = self.mapped(process.pid)
        said = {entry.npu_device for entry in mapped if entry.npu_device is not None}
        if process.npu_device is not None:
            said.add(process.npu_device)
        seen = self.users(process)
        if len({entry.rank for entry in mapped}) > 1:
            return (), f"the rank map gives it the ranks {_numbers(entry.rank for entry in mapped)}"
        if len(said) > 1:
            return (), f"it is said to use the NPUs {_numbers(said)}"
        if not said:
            return tuple(seen), ""
        number = said.pop()
        found = self._numbered.get(number, [])
        if len(found) > 1:
            return (), f"{len(found)} chips are called NPU {number}"
        if not found:
            return (), f"there is no NPU {number} in the snapshot" if self.devices else ""
        if seen and found[0] not in seen:
            return (), f"it is said to use NPU {number}, and npu-smi shows it on NPU {_numbers(map(number_of, seen))}"
        return tuple(found), ""

    def near(self, devices: Iterable[NpuDevice]) -> tuple[CpuSet | None, str]:
        """Return the CPUs near some NPUs, and the source; None for no NPU, and where one has none that is known."""
        near, sources = CpuSet(), set()
        for device in devices:
            cpus, source = self._near_one(device)
            if cpus is None:
                return None, ""
            near |= cpus
            sources.add(source)
        return (near, ", ".join(sorted(sources))) if near else (None, "")

    def _near_one(self, device: NpuDevice) -> tuple[CpuSet | None, str]:
        if device.local_cpus:
            return self._parse(device.local_cpus), device.local_source or "its CPU list"
        cpus = None if device.numa_node is None else self._nodes.get(device.numa_node)
        return (cpus, f"node {device.numa_node}") if cpus else (None, "")


def number_of(device: NpuDevice) -> int:
    """Return the number that callers use for an NPU: the chip logic id, the card id where no source says one."""
    return device.device_id if device.logical_id is None else device.logical_id


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))
