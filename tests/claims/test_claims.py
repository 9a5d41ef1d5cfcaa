import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from berth.claims.claims import Claim, cpu_node, holders, refusal, try_claim
from berth.errors import AbilityError, ForbiddenError
from berth.host.cpuset import CpuSet

# Claims the CPUs argv[1] as argv[2] says, prints its pid and what came of it, and holds it until its input ends.
CLAIM = """
import os
from berth.claims.claims import Claim, try_claim
from berth.host.cpuset import CpuSet
claim = try_claim(CpuSet.parse_list(sys.argv[1]), shared=sys.argv[2] == "shared")
print(os.getpid(), "claimed" if isinstance(claim, Claim) else f"taken {claim}", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Space:
    """A claim space of its own: every mounted sysfs of another network namespace has CPU nodes of its own.

    Without it these tests would meet the claims of everybody who uses berth on this machine, and disturb them.
    """

    prefix: Sequence[str]

    def claim(self, starter, cpus: str, kind: str, *, user: Sequence[str] = ()) -> tuple[subprocess.Popen[str], str]:
        """Start a process that claims `cpus`; return it with what came of it."""
        process = starter.start(CLAIM, cpus, kind, prefix=[*self.prefix, *user])
        pid, outcome = process.stdout.readline().strip().split(" ", 1)
        assert int(pid) == process.pid
        return process, outcome


@pytest.fixture
def space() -> Iterator[Space]:
    """Return a claim space that nobody else is in."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("unshare and nsenter (package util-linux) are not installed")
    identity = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = "mount -t sysfs sysfs /sys && echo ready && exec cat"
    words = ["unshare", *identity, "--mount", "--net", "sh", "-c", script]
    with subprocess.Popen(words, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            pytest.skip("a sysfs of its own cannot be mounted here")
        enter = ["--user", "--preserve-credentials"] if identity else []
        yield Space(["nsenter", f"--target={holder.pid}", *enter, "--mount", "--net", "--"])
        holder.kill()


# --- who goes together -----------------------------------------------------------------------------------------------

MATRIX = [
    ("exclusive", "exclusive", "taken 0"),
    ("exclusive", "shared", "taken 0"),
    ("shared", "exclusive", "taken 0"),
    ("shared", "shared", "claimed"),
]


@pytest.mark.parametrize(("first", "second", "outcome"), MATRIX)
def test_two_processes(space, children, first: str, second: str, outcome: str) -> None:
    assert space.claim(children, "0", first)[1] == "claimed"
    assert space.claim(children, "0", second)[1] == outcome


@pytest.mark.parametrize(("first", "second", "outcome"), MATRIX)
@pytest.mark.parametrize("order", ["root first", "root second"])
def test_two_users(space, readable_children, other_user, first: str, second: str, outcome: str, order: str) -> None:
    users = ([], other_user) if order == "root first" else (other_user, [])
    assert space.claim(readable_children, "0", first, user=users[0])[1] == "claimed"
    assert space.claim(readable_children, "0", second, user=users[1])[1] == outcome


def test_claim_falls_with_its_holder(space, children) -> None:
    holder, _ = space.claim(children, "0", "exclusive")
    assert space.claim(children, "0", "exclusive")[1] == "taken 0"
    holder.kill()
    holder.wait()
    assert space.claim(children, "0", "exclusive")[1] == "claimed"


def test_claims_of_another_users_killed_process_fall(space, readable_children, other_user) -> None:
    holder, _ = space.claim(readable_children, "0", "exclusive", user=other_user)
    holder.kill()
    holder.wait()
    assert space.claim(readable_children, "0", "exclusive")[1] == "claimed"


def two_cpus() -> None:
    if not os.path.exists(cpu_node(1)):
        pytest.skip("needs a machine with CPUs 0 and 1")


def test_claims_of_other_cpus_do_not_meet(space, children) -> None:
    two_cpus()
    assert space.claim(children, "0", "exclusive")[1] == "claimed"
    assert space.claim(children, "1", "exclusive")[1] == "claimed"


def test_all_or_none(space, children) -> None:
    """A claim of which one CPU is taken names that one and keeps none of the others."""
    two_cpus()
    holder, _ = space.claim(children, "1", "exclusive")
    assert space.claim(children, "0-1", "exclusive")[1] == "taken 1"
    assert space.claim(children, "0", "exclusive")[1] == "claimed"
    holder.kill()


def test_heir_of_the_descriptors_keeps_the_claim(space, children) -> None:
    """The claimer lets go and dies; the process that inherited the descriptors still claims."""
    claimer = children.start(
        "import os, signal\n"
        "from berth.claims.claims import try_claim\n"
        "from berth.host.cpuset import CpuSet\n"
        "claim = try_claim(CpuSet.of([0]))\n"
        "if os.fork() == 0:\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "claim.release()\n"
        "print(flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        prefix=space.prefix,
    )
    claimer.stdout.readline()
    claimer.wait()
    assert space.claim(children, "0", "exclusive")[1] == "taken 0"
    claimer.stdin.close()
    assert claimer.stdout.read() == ""  # The heir has ended.
    assert space.claim(children, "0", "exclusive")[1] == "claimed"


def test_release_frees_at_once(space, children) -> None:
    printed = children.run(
        "import os\n"
        "from berth.claims.claims import Claim, try_claim\n"
        "from berth.host.cpuset import CpuSet\n"
        "before = os.listdir('/proc/self/fd')\n"
        "for _ in range(3):\n"
        "    claim = try_claim(CpuSet.of([0]))\n"
        "    print(isinstance(claim, Claim), try_claim(CpuSet.of([0])))\n"
        "    claim.release()\n"
        "print(os.listdir('/proc/self/fd') == before, end='')\n",
        prefix=space.prefix,
    )
    assert printed == "True 0\n" * 3 + "True"


# --- who holds it ----------------------------------------------------------------------------------------------------


def test_refusal_names_the_holders(space, children) -> None:
    two_cpus()
    shared = [space.claim(children, "0", "shared")[0] for _ in range(2)]
    exclusive, _ = space.claim(children, "1", "exclusive")
    printed = children.run(
        "from berth.claims.claims import holders, refusal, try_claim\n"
        "from berth.host.cpuset import CpuSet\n"
        "taken = try_claim(CpuSet.of([0, 1]))\n"
        "print(holders(0), holders(1))\n"
        "error = refusal(taken, 'CPUs 0-1')\n"
        "print(error.name, error.code)\n"
        "print(error.message)\n",
        prefix=space.prefix,
    )
    pids = sorted(process.pid for process in shared)
    held, code, message = printed.splitlines()
    assert held == f"{tuple(pids)} ({exclusive.pid},)"
    assert code == "cores-claimed 4"
    assert message.startswith("CPUs 0-1 cannot be claimed: CPUs 0 by ")
    assert all(f"pid {pid} (" in message for pid in [*pids, exclusive.pid])
    assert "python" in message


def test_refusal_without_a_visible_holder() -> None:
    """A CPU that was free again by the time somebody looks still gives a whole sentence."""
    error = refusal(CpuSet(), "2 free cores among CPUs 0-1")
    assert isinstance(error, ForbiddenError)
    assert "--share-cores" in error.fix


def test_cpu_without_a_node() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(AbilityError, match="cpu65000/uevent: No such file") as caught:
        try_claim(CpuSet.of([65000]))
    assert caught.value.name == "no-claims"
    with pytest.raises(AbilityError):
        holders(65000)
    assert os.listdir("/proc/self/fd") == before


def test_claim_of_nothing() -> None:
    claim = try_claim(CpuSet())
    assert claim == Claim(CpuSet(), False, ())


def test_node_is_that_of_the_kernel() -> None:
    assert cpu_node(17) == "/sys/devices/system/cpu/cpu17/uevent"
