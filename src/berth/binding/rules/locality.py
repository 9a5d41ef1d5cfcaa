"""Rules about distance: nodes, accelerators and memory."""

from typing import Final

from berth.binding.finding import Finding
from berth.binding.names import grouped, pids_of
from berth.binding.rules.conditions import (
    accelerated,
    locality,
    narrowed,
    near_within,
    npu_names,
    pinned_families,
)
from berth.binding.view import Task, View
from berth.host.cpuset import CpuSet

#: Part of a process's resident pages beyond which its memory counts as mostly far.
_FAR: Final = 0.5
#: Pages of 4 KiB below which the place of memory does not matter: 64 MiB.
FEW_PAGES: Final = 16384
#: Percent of one CPU from which on a thread counts as running during a sample.
_RUNS_PERCENT: Final = 1.0


def across_nodes(view: View) -> Finding | None:
    """R002: threads of one process were seen on several nodes."""
    found = [task for task in view.placed if len(seen_nodes(view, task)) > 1]
    if not found:
        return None
    return Finding(
        id="R002",
        title="Runs across NUMA nodes",
        severity="medium",
        impact=["throughput", "latency"],
        evidence=grouped(found, lambda task: f"threads seen on the nodes {_list(seen_nodes(view, task))}"),
        judgement="Threads of one process that run on several nodes read memory of the others over the interconnect.",
        recommendations=["Keep all threads of a process on one node, the one next to its accelerator."],
        risk="A process that needs more CPUs than a node has loses throughput.",
        verification=["the nodes that its threads are seen on", "share of pages on far nodes"],
        pids=pids_of(found),
    )


def wrong_side(view: View) -> Finding | None:
    """R003: the mask has none of the CPUs near the accelerator, although the cpuset has."""
    explained = set(narrowed(view)) | {task.pid for family in pinned_families(view) for task in family}
    found = [task for task in view.leaders if task.pid not in explained and _misses(view, task)]
    if not found:
        return None
    return Finding(
        id="R003",
        title="Rank, NPU and NUMA node do not match",
        severity="medium",
        impact=["throughput", "latency"],
        evidence=grouped(
            found,
            lambda task: (
                f"{task.mask_text}, nodes {_list(view.nodes_of(task.union))}; {npu_names(task)} has "
                f"{near_within(view, task)} near it in the cpuset ({task.near_source})"
            ),
        ),
        judgement="Every access to the accelerator crosses the interconnect.",
        recommendations=["Move the process to the CPUs near its accelerator: `berth bind plan`."],
        risk="Its memory stays where it is: pages that were touched before the move are far afterwards.",
        verification=["`berth bind verify`", "step time, and copies between host and device, before and after"],
        pids=pids_of(found),
    )


def untrusted_nodes(view: View) -> Finding | None:
    """R016: nodes that claim the same CPU, or a core that lies in several."""
    overlap = CpuSet.parse_list(view.snapshot.numa_topology.overlapping_cpus) | view.topology.node_overlap
    if not overlap and not view.split_cores:
        return None
    evidence = [f"claimed by more than one node: CPUs {overlap}"] if overlap else []
    evidence += [f"siblings in different nodes: CPUs {core.cpus}" for core in view.split_cores[:3]]
    return Finding(
        id="R016",
        title="NUMA nodes that cannot be trusted",
        severity="medium",
        impact=["stability"],
        evidence=evidence,
        judgement="A core has one place, so what the firmware says about nodes is wrong here, or the nodes are faked. "
        "Nothing is decided from the nodes of this host.",
        recommendations=["Look for numa=fake on the kernel's command line, and for a firmware update."],
        risk="None: this is about reading.",
        verification=["`numactl -H` and `lscpu -e` after the next start"],
        pids=[],
    )


def near_outside_cpuset(view: View) -> Finding | None:
    """R017: the cpuset has none of the CPUs near the accelerator."""
    found = [task for task in view.leaders if _has_nothing_near(view, task)]
    if not found:
        return None
    return Finding(
        id="R017",
        title="Accelerator wholly outside the cpuset",
        severity="high",
        impact=["throughput", "latency"],
        evidence=grouped(
            found, lambda task: f"{npu_names(task)} has {task.near} near it ({task.near_source}), cpuset {task.limit}"
        ),
        judgement="No mask can bring these processes near their accelerator. They get no action: any would be a guess.",
        recommendations=[
            "Have the cpuset changed by whoever set it: Topology Manager `single-numa-node` in Kubernetes, "
            "`--cpuset-cpus` of the container, `--gpu-bind` or `--cpu-bind` of Slurm.",
            "Or give the job an accelerator near the CPUs that it has.",
        ],
        risk="A new cpuset usually means a new start of the container.",
        verification=["the cpuset and the near CPUs in a new snapshot"],
        pids=pids_of(found),
    )


def far_pages(view: View) -> Finding | None:
    """R018: most resident pages lie on nodes other than those the process belongs to."""
    found = [task for task in view.placed if far_share(view, task) > _FAR]
    if not found:
        return None
    return Finding(
        id="R018",
        title="Memory mostly on a far node",
        severity="medium",
        impact=["throughput", "latency"],
        evidence=grouped(
            found,
            lambda task: (
                f"{far_share(view, task):.0%} of its pages are not on the nodes {_list(home_nodes(view, task))} "
                f"(pages by node: {_pages_text(task)})"
            ),
        ),
        judgement="Changing CPUs moves no memory: pages stay where they were first touched.",
        recommendations=[
            "Start the job with its mask already in place, so that its memory is touched on the right node.",
            "Or move the pages of the running process once: migratepages(8).",
        ],
        risk="Moving pages stops the process for a while, needs SYS_NICE for shared pages; no CPU rollback undoes it.",
        verification=["pages by node in a new snapshot"],
        pids=pids_of(found),
    )


def sources_contradict(view: View) -> Finding | None:
    """R019: what ties a process to an NPU is contradictory."""
    found = [task for task in view.involved if task.conflict]
    if not found:
        return None
    return Finding(
        id="R019",
        title="Contradicting device of a process",
        severity="medium",
        impact=["stability"],
        evidence=grouped(found, lambda task: task.conflict),
        judgement="Card id, chip logic id, physical id and the number inside a container are four things, and a "
        "worker's device need not be its local rank. While the sources contradict each other no NPU counts as near.",
        recommendations=["Give the right pairs with --rank-map, in chip logic ids of the host."],
        risk="A wrong pair binds a rank to the far side.",
        verification=["the process table of `npu-smi info`"],
        pids=pids_of(found),
    )


def nothing_near_known(view: View) -> Finding | None:
    """R020: nothing says which of the CPUs are near."""
    found = [task for task in view.leaders if not task.lacks and not task.conflict and locality(view, task)[0] is None]
    if not found:
        return None
    return Finding(
        id="R020",
        title="Nothing says what is near",
        severity="medium" if any(accelerated(view, task) for task in found) else "low",
        impact=["throughput"],
        evidence=grouped(found, _why_unknown),
        judgement="The cpuset spans several nodes and no source tells which one these processes belong to. The policy "
        "`near` leaves them alone: a node derived from a rank would be a guess.",
        recommendations=[
            "Say which process uses which NPU: --rank-map.",
            "Or ask for cores without locality: `berth bind plan --policy exclusive` or `--policy spread`.",
        ],
        risk="Binding to the wrong node is slower than no binding.",
        verification=["near CPUs in a new snapshot"],
        pids=pids_of(found),
    )


def seen_nodes(view: View, task: Task) -> list[int]:
    """Return the nodes that the threads of a process were seen on; those that ran, where a sample tells which did."""
    sampled = any(thread.cpu_percent is not None for thread in task.process.threads)
    cpus: set[int] = set()
    for thread in task.process.threads:
        if not sampled or (thread.cpu_percent or 0.0) >= _RUNS_PERCENT:
            cpus.update(thread.cpus_seen or ([] if thread.current_cpu is None else [thread.current_cpu]))
    return view.nodes_of(CpuSet.of(cpus))


def home_nodes(view: View, task: Task) -> list[int]:
    """Return the nodes that a process belongs to: those near its accelerator, else those that it is bound to."""
    near = near_within(view, task)
    if near:
        return view.nodes_of(near)
    return [] if view.unbound(task) else view.nodes_of(task.union)


def far_share(view: View, task: Task) -> float:
    """Return the part of its pages on other nodes than its own; 0 where that is unknown or does not matter."""
    pages = task.process.pages_by_node or {}
    total, home = sum(pages.values()), home_nodes(view, task)
    memory = {node.node: node.memory_total_mb for node in view.snapshot.numa_topology.nodes}
    if total < FEW_PAGES or not any(memory.get(node) != 0 for node in home):
        return 0.0
    return 1 - sum(pages.get(str(node), 0) for node in home) / total


def _misses(view: View, task: Task) -> bool:
    near = near_within(view, task)
    return bool(near) and near is not None and task.union.isdisjoint(near)


def _has_nothing_near(view: View, task: Task) -> bool:
    near, _ = locality(view, task)
    return task.near is not None and near is not None and not near


def _why_unknown(task: Task) -> str:
    which = f"{npu_names(task)} has no CPUs or node that are known" if task.devices else "no accelerator of it is known"
    return f"{which}; cpuset {task.limit}"


def _pages_text(task: Task) -> str:
    pages = task.process.pages_by_node or {}
    return ", ".join(f"{node}: {pages[node]}" for node in sorted(pages, key=lambda text: (len(text), text)))


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
