import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.binding.choose import full_command, matching, parse_ranks, read_ranks
from berth.binding.snapshot import RankEntry
from berth.errors import MalformedError


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that sleeps for a number of seconds nobody else would choose."""
    process = subprocess.Popen(["sleep", "4242.4242"])
    while not full_command(process.pid).startswith(
        "sleep"
    ):  # the kernel shows it a moment after it has begun the program
        pass
    yield process
    process.kill()
    process.wait()


def test_pattern_finds_a_process_by_its_command_line(sleeper: subprocess.Popen[bytes]) -> None:
    assert matching([r"^sleep 4242\.42"]) == [sleeper.pid]
    assert matching(["nothing like it", r"4242\.4242"]) == [sleeper.pid]


def test_pattern_never_finds_whoever_asks_or_its_parents(children) -> None:
    code = """
import os
from berth.binding.choose import matching
from berth.errors import MalformedError
try: print(matching(["marker-of-this-test"]))
except MalformedError as error: print(error.name)
"""
    shell = ["sh", "-c", '"$@"; :', "marker-of-this-test"]
    code = f"sys.path += {[path for path in sys.path if 'packages' in path]!r}\n" + code
    assert children.run(code, "marker-of-this-test", prefix=shell) == "no-match\n"


@pytest.mark.parametrize("pattern", ["(", "[a", "*"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(MalformedError) as caught:
        matching([pattern])
    assert caught.value.name == "bad-pattern"


# Opens a chip's node in a private /dev, and says whether it is found among the holders before and while it is open.
HOLDER = """
import os, subprocess
from berth.binding.choose import holding_accelerators
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev"], check=True)
before = os.getpid() in holding_accelerators()
held = open("/dev/davinci3", "w")
print(before, os.getpid() in holding_accelerators())
"""


def test_holders_of_an_accelerator_are_found_by_their_open_files(children, as_root: None) -> None:
    unshare = ["unshare", "--mount"]
    if subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("no private mounts can be made here")
    code = f"sys.path += {[path for path in sys.path if 'packages' in path]!r}\n" + HOLDER
    assert children.run(code, prefix=unshare) == "False True\n"


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("rank0=12:npu3", [(0, 12, 3)]),
        ("0=12", [(0, 12, None)]),
        ("rank0=12:npu0,rank1=13:1", [(0, 12, 0), (1, 13, 1)]),
        ("# who\nrank0=12:npu0  # first\n\nrank1=13\n", [(0, 12, 0), (1, 13, None)]),
        ("", []),
    ],
)
def test_rank_map(text: str, ranks: list[tuple[int, int, int | None]]) -> None:
    assert parse_ranks(text) == tuple(RankEntry(rank=r, pid=p, npu_device=n) for r, p, n in ranks)


@pytest.mark.parametrize("text", ["rank0", "rank0=", "rank0=abc", "0=1:gpu2", "0=1;1=2", "-1=2", "0=1:npu", "0==1"])
def test_what_is_no_rank_map_is_refused_and_shown(text: str) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_ranks(text)
    assert caught.value.name == "bad-rank-map"
    assert repr(text) in caught.value.message


def test_rank_map_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("rank0=12:npu0\n")
    assert read_ranks(str(tmp_path / "ranks")) == parse_ranks("rank0=12:npu0")
    (tmp_path / "ranks").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "ranks", tmp_path):
        with pytest.raises(MalformedError):
            read_ranks(str(path))
