"""Snapshots of real processes of this machine, compared with what is known of them."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from berth.binding.collect import CollectRequest, collect
from berth.binding.snapshot import NpuDevice, NpuTopology, RankEntry, Snapshot, decode_snapshot, encode_snapshot
from berth.errors import ForbiddenError, MalformedError
from berth.host.cpuset import CpuSet

NOTHING = NpuTopology(vendor=None, source=[])
# Starts argv[1] threads that wait, one of them on the lowest CPU alone, and a child; says when all are there.
WORKER = """
import os, subprocess, sys, threading
def pinned(): os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); ready.wait(); stop.wait()
def plain(): ready.wait(); stop.wait()
count = int(sys.argv[1])
ready, stop = threading.Barrier(count + 1), threading.Event()
for number in range(count):
    threading.Thread(target=pinned if number == 0 else plain, daemon=True).start()
child = subprocess.Popen(["sleep", "1000"])
ready.wait()
print("ready", flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    """Return a process of five threads with a secret in its arguments, a rank in its environment, and a child."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", WORKER, "4", "--token", "geheim"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"RANK": "3", "OMP_NUM_THREADS": "2", "HF_TOKEN": "geheim"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def look(*pids: int, **options: object) -> Snapshot:
    return collect(CollectRequest(pids=pids, **options), accelerators=NOTHING)  # type: ignore[arg-type]


def test_threads_masks_and_children_are_seen(worker: subprocess.Popen[str]) -> None:
    found = look(worker.pid)
    (process,) = [process for process in found.processes if process.target]
    assert len(process.threads) == process.num_threads == 5
    assert sorted(thread.tid for thread in process.threads) == sorted(map(int, os.listdir(f"/proc/{worker.pid}/task")))
    for thread in process.threads:
        assert set(CpuSet.parse_list(thread.cpus_allowed_list)) == os.sched_getaffinity(thread.tid)
    (child,) = [process for process in found.processes if process.ppid == worker.pid]
    assert (child.comm, child.target, process.children) == ("sleep", False, [child.pid])
    assert os.getpid() in [process.pid for process in found.processes]


def test_whole_host_is_described(worker: subprocess.Popen[str]) -> None:
    found = look(worker.pid)
    assert {cpu.cpu for cpu in found.cpu_topology.cpus} == set(CpuSet.parse_list(found.system.online_cpus))
    group = found.group(worker.pid)
    assert group is not None
    assert group.cpuset_cpus_effective is not None
    assert os.sched_getaffinity(0) <= set(CpuSet.parse_list(group.cpuset_cpus_effective))


def test_secrets_stay_where_they_are(worker: subprocess.Popen[str]) -> None:
    data = encode_snapshot(look(worker.pid))
    assert b"geheim" not in data
    assert b"--token REDACTED" in data
    process = decode_snapshot(data, source="it").process(worker.pid)
    assert process is not None
    assert process.environment == {"OMP_NUM_THREADS": "2", "RANK": "3"}


def test_rank_comes_from_the_environment_unless_the_user_says_it(worker: subprocess.Popen[str]) -> None:
    process = look(worker.pid).process(worker.pid)
    assert process is not None
    assert (process.rank, process.npu_device) == (3, None)
    process = look(worker.pid, ranks=(RankEntry(rank=7, pid=worker.pid, npu_device=2),)).process(worker.pid)
    assert process is not None
    assert (process.rank, process.npu_device, process.npu_source) == (7, 2, "user")


def test_npu_comes_from_its_table_of_processes(worker: subprocess.Popen[str]) -> None:
    devices = [NpuDevice(device_id=0, logical_id=0), NpuDevice(device_id=4, logical_id=5, host_pids=[worker.pid])]
    npus = NpuTopology(vendor="Huawei", source=["npu-smi"], devices=devices)
    process = collect(CollectRequest(pids=(worker.pid,)), accelerators=npus).process(worker.pid)
    assert process is not None
    assert (process.npu_device, process.npu_source) == (5, "npu-smi")


def test_load_is_what_a_busy_process_uses() -> None:
    busy = subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"])
    try:
        found = look(busy.pid, sample_s=0.5)
    finally:
        busy.kill()
        busy.wait()
    process = found.process(busy.pid)
    assert process is not None
    assert process.cpu_percent is not None
    assert 5 < process.cpu_percent <= 120
    assert process.threads[0].cpus_seen
    assert found.runtime_sample is not None
    assert found.key_processes.top_threads == [(busy.pid, busy.pid)]


def test_what_is_gone_or_the_kernels_own_is_no_target() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(ForbiddenError) as caught:
        look(ended.pid)
    assert caught.value.name == "no-such-process"
    if os.path.exists("/proc/2/comm"):
        with pytest.raises(ForbiddenError) as caught:
            look(2)
        assert caught.value.name in ("kernel-thread", "no-such-process")


def test_what_cannot_be_read_is_a_gap_with_its_effect(readable_children, other_user: list[str]) -> None:
    code = """
from berth.binding.collect import CollectRequest, collect
from berth.binding.snapshot import NpuTopology
found = collect(CollectRequest(pids=(int(sys.argv[1]),)), accelerators=NpuTopology(vendor=None, source=[]))
gaps = sorted((gap.component, gap.pid) for gap in found.availability.missing if gap.effect)
print(found.availability.complete, gaps)
"""
    code = f"sys.path += {[path for path in sys.path if 'packages' in path]!r}\n" + code
    pid = os.getpid()
    try:
        out = readable_children.run(code, pid, prefix=other_user)
    except AssertionError as error:
        if "No module named" in str(error):
            pytest.skip("other users may not read what berth imports")
        raise
    assert out == f"False [('processes.environment', {pid}), ('processes.pages_by_node', {pid})]\n"


@pytest.mark.parametrize("ranks", [((0, 1), (0, 2)), ((0, 1), (1, 1))])
def test_rank_map_names_nobody_twice(ranks: tuple[tuple[int, int], ...]) -> None:
    entries = tuple(RankEntry(rank=rank, pid=os.getpid() + offset) for rank, offset in ranks)
    with pytest.raises(MalformedError) as caught:
        look(os.getpid(), ranks=entries)
    assert caught.value.name == "bad-rank-map"


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_half_a_snapshot_is_none(cut: int) -> None:
    data = encode_snapshot(look(os.getpid()))
    with pytest.raises(MalformedError) as caught:
        decode_snapshot(data[:cut], source="half.json")
    assert caught.value.name == "bad-snapshot"
    assert "half.json" in caught.value.message


@pytest.mark.parametrize("version", ['"0.1.1"', '"0.3.0"', '"1.0.0"', "null", "7"])
def test_snapshot_of_another_version_is_refused(version: str) -> None:
    data = encode_snapshot(look(os.getpid())).replace(
        b'"schema_version": "0.2.0"', b'"schema_version": ' + version.encode()
    )
    with pytest.raises(MalformedError):
        decode_snapshot(data, source="other.json")
