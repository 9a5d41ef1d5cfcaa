"""NUMA nodes from sysfs: CPUs, memory and distances (the kernel's ABI/stable/sysfs-devices-node)."""

import re

from berth.errors import MalformedError
from berth.host.cpuset import CpuSet
from berth.host.sysfs import NODE_DIRECTORY, numbered, read_list_or_mask, read_optional
from berth.host.topology import Node

_MEMORY = re.compile(r"^Node +[0-9]+ +(MemTotal|MemFree): +([0-9]{1,15}) kB$", re.MULTILINE)
_KIB = 1024


def read_nodes(root: str, online: CpuSet) -> tuple[Node, ...]:
    """Return the nodes by number, their CPUs cut to `online`: old kernels and edited trees list others too.

    Raises:
        MalformedError: A file does not hold what the kernel documents.
        OSError: A file is there and cannot be read.
    """
    nodes = []
    for number in numbered(root, NODE_DIRECTORY, "node"):
        directory = f"{NODE_DIRECTORY}/node{number}"
        cpus = read_list_or_mask(root, f"{directory}/cpulist", f"{directory}/cpumap")
        memory = dict(_MEMORY.findall(read_optional(root, f"{directory}/meminfo") or ""))
        nodes.append(
            Node(
                number=number,
                cpus=CpuSet() if cpus is None else cpus & online,
                memory_total_bytes=_bytes(memory.get("MemTotal")),
                memory_free_bytes=_bytes(memory.get("MemFree")),
            )
        )
    return tuple(nodes)


def read_distances(root: str, nodes: tuple[Node, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Return a row of distances per node, in the order of `nodes`; None unless the kernel gives every one of them.

    Raises:
        MalformedError: `bad-distances`: a row holds something else than numbers.
        OSError: A file is there and cannot be read.
    """
    rows = []
    for node in nodes:
        path = f"{NODE_DIRECTORY}/node{node.number}/distance"
        text = read_optional(root, path) or ""
        if not re.fullmatch(r"[0-9 \n]*", text):
            raise MalformedError("bad-distances", f"{path} holds {text[:80]!a} where the kernel writes distances.")
        rows.append(tuple(map(int, text.split())))
    return tuple(rows) if rows and all(len(row) == len(nodes) for row in rows) else None


def _bytes(kib: str | None) -> int | None:
    return None if kib is None else int(kib) * _KIB
