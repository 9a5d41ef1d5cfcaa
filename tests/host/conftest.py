"""Recorded machines: trees of /sys and /proc, each with the right answers, worked out by hand and by hwloc."""

import bz2
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MACHINES = Path(__file__).resolve().parents[3] / "shared" / "data" / "topologies"

# What berth.host reads: the CPU and node trees, the model, the mount table, the process and its cgroups.
WANTED = re.compile(
    r"[^/]+/sys/devices/system/("
    r"cpu/(online|present|possible|isolated|nohz_full)"
    r"|cpu/cpu[0-9]+(/online"
    r"|/topology/(core_cpus_list|thread_siblings|thread_siblings_list|physical_package_id|core_id)"
    r"|/cache/index[0-9]/(level|type|size|shared_cpu_list|shared_cpu_map)"
    r"|/cpufreq/(cpuinfo_max_freq|scaling_cur_freq))?"
    r"|node/node[0-9]+(/cpulist|/cpumap|/distance|/meminfo)?)"
    r"|[^/]+/proc/(cpuinfo|mounts|self/(cgroup|cpuset))"
    r"|[^/]+/(?!sys/devices).*/((cpuset\.)?(effective_)?(cpus|mems)(\.effective)?|cpu\.(max|stat|weight)|cgroup\.(type|controllers))"
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One recorded machine: its root directory and what is true of it."""

    root: str
    expected: dict[str, Any]


def machine_files() -> list[str]:
    """Name the tarballs at hand, or one stand-in that makes the tests skip."""
    return sorted(path.name for path in MACHINES.glob("*.tar.bz2")) or ["none"]


@pytest.fixture(scope="session")
def unpacked() -> dict[str, Machine]:
    """Hold the machines unpacked so far, so that each is unpacked once."""
    return {}


@pytest.fixture(params=machine_files())
def machine(
    request: pytest.FixtureRequest, unpacked: dict[str, Machine], tmp_path_factory: pytest.TempPathFactory
) -> Machine:
    """Return each recorded machine in turn."""
    if request.param == "none":
        pytest.skip("the recorded machines are not at hand (../shared/data/topologies)")
    if request.param not in unpacked:
        unpacked[request.param] = unpack(request.param, tmp_path_factory.mktemp("machine"))
    return unpacked[request.param]


def unpack(file: str, target: Path) -> Machine:
    """Write the wanted regular files of one tarball below `target`; links are left out, nothing here follows any."""
    entries = json.loads((MACHINES / "expected.json").read_text())["entries"]
    expected = next(entry for entry in entries if entry["file"] == file)
    plain = io.BytesIO(bz2.decompress((MACHINES / file).read_bytes()))  # Twice as fast as letting tarfile seek in bz2.
    with tarfile.open(fileobj=plain) as archive:
        for member in archive:
            if not WANTED.fullmatch(member.name.rstrip("/")) or ".." in member.name:
                continue
            path = target / member.name
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            elif member.isreg() and (stream := archive.extractfile(member)) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(stream.read())
    return Machine(root=str(target / expected["top_directory"]), expected=expected)


@pytest.fixture
def tree(tmp_path: Path) -> "Tree":
    """Return a machine to be written file by file."""
    return Tree(tmp_path)


@dataclass(frozen=True)
class Tree:
    """A small made-up machine."""

    path: Path

    @property
    def root(self) -> str:
        """The root to read it under."""
        return str(self.path)

    def write(self, files: dict[str, str]) -> None:
        """Write files, given by their absolute path on the machine."""
        for name, text in files.items():
            path = self.path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@dataclass(frozen=True)
class Zoo:
    """Two hundred processes of mixed kinds, each as it described itself."""

    animals: tuple[dict[str, Any], ...]

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return those of some kinds that could become what they are."""
        return [animal for animal in self.animals if animal["kind"] in kinds and not animal.get("refused")]


@pytest.fixture(scope="package")
def zoo() -> Iterator[Zoo]:
    """Start the processes of zoo.py; all of them have described themselves."""
    command = [os.path.realpath(sys.executable), "-I", "-S", str(Path(__file__).with_name("zoo.py")), "last word"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        try:
            lines = [keeper.stdout.readline() for _ in range(int(keeper.stdout.readline()))]
            assert all(lines), "a process ended before it described itself"
            yield Zoo(tuple(map(json.loads, lines)))
        finally:
            keeper.kill()
