"""The programs that are swept, with what must hold after each fault; and broken ones that the sweep has to catch.

Most are a sequence of acknowledged steps: `Steps` is their check. A new one takes the text of a program, the states of
the disk before and after each of its steps, and a recovery.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from berth.durable.files import durable_write
from berth.durable.state import StateFile
from berth.epoch.epoch import EpochRoot
from berth.epoch.names import active_name, is_probe, retired_name
from berth.epoch.reclaim import UNLIMITED, reclaim
from faults.invariants import Tree, ViolationError, check_next_start, check_progress, check_tree, read_tree
from faults.sweep import Fault, Run, Scenario

EPOCH: Final = "e" * 64
RETIREMENT: Final = "0" * 32
ACTIVE: Final = active_name(EPOCH)
RETIRED: Final = retired_name(EPOCH, RETIREMENT)
OLD: Final = b"old " * 1000
NEW: Final = b"new" * 700


@dataclass(frozen=True)
class Steps:
    """The check of a program that acknowledges step after step.

    Attributes:
        states: The tree before the first step and after each one.
        composite: The steps, by number from 0, of which an error may leave a part.
        torn: What a power cut may leave of a step that moves a name between two directories: btrfs shows it in both.
    """

    states: Sequence[Tree]
    composite: Collection[int] = ()
    torn: Mapping[int, Tree] = field(default_factory=dict)

    def __call__(self, root: Path, run: Run) -> None:
        """Check the disk after `run`; see `invariants` for the rule.

        An error says more than a kill does: a plain one that nothing was changed, UncertainError that the step is
        visible; and either leaves no temporary.
        """
        done = len(run.acknowledged)
        if run.fault in (Fault.KILL, Fault.CUT):
            torn = [self.torn[done]] if run.fault is Fault.CUT and done in self.torn else []
            check_progress(read_tree(root), self.states, done, between=torn)
        elif not run.error:
            check_tree(read_tree(root), self.states[-1:])
        elif done in self.composite:
            check_tree(read_tree(root), self.states[done : done + 2])
        else:
            shown = done + 1 if "UncertainError" in run.error else done
            check_tree(read_tree(root), self.states[shown : shown + 1])


# --- an epoch is opened, filled and retired --------------------------------------------------------------------------

RETIRE: Final = Scenario(
    name="retire",
    program=f"""
from berth.epoch.epoch import EpochRoot
opened = EpochRoot(root)
begin()
epoch = opened.open_epoch({EPOCH!r})
done("opened")
epoch.write("request.json", {OLD!r})
done("wrote")
epoch.write("result", {NEW!r})
done("wrote")
epoch.retire({RETIREMENT!r})
done("retired")
""",
    check=Steps(
        states=(
            {},
            {ACTIVE: None},
            {ACTIVE: None, f"{ACTIVE}/request.json": OLD},
            {ACTIVE: None, f"{ACTIVE}/request.json": OLD, f"{ACTIVE}/result": NEW},
            {RETIRED: None, f"{RETIRED}/request.json": OLD, f"{RETIRED}/result": NEW},
        ),
        composite=[0],
    ),
    recover=check_next_start,
)

# --- a record leaves the epoch for a directory of records ------------------------------------------------------------

_PUBLISHING: Final[Tree] = {ACTIVE: None, "records": None}
PUBLISH: Final = Scenario(
    name="publish",
    prepare=lambda root: (root / "records").mkdir(),
    program=f"""
from berth.epoch.epoch import EpochRoot
epoch = EpochRoot(root).open_epoch({EPOCH!r})
records = os.open(os.path.join(root, "records"), os.O_RDONLY | os.O_DIRECTORY)
begin()
epoch.write("record.json", {NEW!r})
done("wrote")
epoch.publish("record.json", dir_fd=records, as_name="record")
done("published")
""",
    check=Steps(
        states=(
            _PUBLISHING,
            {**_PUBLISHING, f"{ACTIVE}/record.json": NEW},
            {**_PUBLISHING, "records/record": NEW},
        ),
        torn={1: {**_PUBLISHING, f"{ACTIVE}/record.json": NEW, "records/record": NEW}},
    ),
    recover=check_next_start,
)

# --- a state root is made, probed and opened -------------------------------------------------------------------------


def check_probe(root: Path, run: Run) -> None:
    """Check that nothing is there but what the next opening removes, and that every failure is one of berth's own."""
    tree = read_tree(root)
    surplus = [path for path in tree if path != "state" and not is_probe(path.split("/")[1])]
    if surplus:
        raise ViolationError(f"opening a root left {surplus}")
    if run.acknowledged and set(tree) != {"state"}:
        raise ViolationError(f"opening a root succeeded and left {sorted(tree)}")
    # The OSError of a refused lock is the one that EpochRoot lets through as it is.
    if not any(call.name == "flock" and "(INJECTED)" in call.text for call in run.calls):
        check_explained(root, run)


def check_explained(root: Path, run: Run) -> None:
    """Check that what failed says what to do about it."""
    if run.error and "BerthError" not in run.error:
        raise ViolationError(f"it failed without saying what to do: {run.error[0]}")


def open_again(root: Path) -> None:
    """Open the root, after which it holds nothing but its lock file."""
    EpochRoot(str(root / "state")).__exit__()
    check_tree(read_tree(root), [{"state": None}])


PROBE: Final = Scenario(
    name="probe",
    program="""
from berth.epoch.epoch import EpochRoot
begin()
EpochRoot(os.path.join(root, "state"))
done("opened")
""",
    check=check_probe,
    recover=open_again,
)

# --- a file is replaced as a whole -----------------------------------------------------------------------------------


def write_again(root: Path) -> None:
    """Write the file once more, which what was left behind must not hinder."""
    durable_write(str(root / "file"), NEW)
    check_tree(read_tree(root), [{"file": NEW}], temporaries=True)


WRITE: Final = Scenario(
    name="write",
    prepare=lambda root: durable_write(str(root / "file"), OLD),
    program=f"""
from berth.durable.files import durable_write
begin()
durable_write(os.path.join(root, "file"), {NEW!r})
done("wrote")
""",
    check=Steps(states=({"file": OLD}, {"file": NEW})),
    recover=write_again,
)

# --- retired epochs are reclaimed ------------------------------------------------------------------------------------

_OTHER: Final = retired_name("d" * 64, "1" * 32)
_STAYS: Final[Tree] = {ACTIVE: None, f"{ACTIVE}/request.json": OLD, "records": None, "records/record": NEW}
_RETIRED: Final[Tree] = {
    **{f"{RETIRED}/{name}": data for name, data in {"": None, "/a": OLD, "/b": None, "/b/c": NEW, "/b/d": OLD}.items()},
    **{f"{_OTHER}/{name}": data for name, data in {"": None, "/e": OLD}.items()},
}
_GOES: Final[Tree] = {path.replace("//", "/").rstrip("/"): data for path, data in _RETIRED.items()}


def fill_root(root: Path) -> None:
    """Make two retired epochs beside an active one and a record."""
    for path, data in {**_STAYS, **_GOES}.items():
        if data is None:
            (root / path).mkdir(mode=0o700)
        else:
            durable_write(str(root / path), data)


def check_reclaim(root: Path, run: Run) -> None:
    """Check that only retired epochs lost names, that what is left of them is as it was, and that done is done."""
    tree = read_tree(root)
    left = {path: data for path, data in tree.items() if path.split("/")[0] in (RETIRED, _OTHER)}
    check_tree({path: data for path, data in tree.items() if path not in left}, [_STAYS])
    if not left.items() <= _GOES.items():
        raise ViolationError(f"what is left of retired epochs was changed: {sorted(left.items() - _GOES.items())}")
    if run.acknowledged and run.fault is not Fault.ERROR and left:
        raise ViolationError(f"everything was reported as removed, and there is {sorted(left)}")
    check_explained(root, run)


def reclaim_again(root: Path) -> None:
    """Make the next step, which removes all that is left and nothing else."""
    with EpochRoot(str(root)) as opened:
        reclaim(opened, UNLIMITED)
    check_tree(read_tree(root), [_STAYS])


RECLAIM: Final = Scenario(
    name="reclaim",
    prepare=fill_root,
    program="""
from berth.epoch.epoch import EpochRoot
from berth.epoch.reclaim import UNLIMITED, reclaim
opened = EpochRoot(root)
begin()
while True:
    found = reclaim(opened, UNLIMITED)
    if not found.removed_entries: break
if not found.blocked: done("reclaimed")
""",
    check=check_reclaim,
    recover=reclaim_again,
)

# --- a state file is made, logged to and folded ----------------------------------------------------------------------

_RECORDS: Final = ({"step": 1}, {"step": 2, "text": "x" * 200})
#: What a reader finds after each acknowledged step: the document and the records that count.
_READ: Final = (
    None,
    ({"plan": "old"}, ()),
    ({"plan": "old"}, _RECORDS[:1]),
    ({"plan": "old"}, _RECORDS),
    ({"plan": "new"}, ()),
)


def read_state(root: Path) -> object:
    """Return what the next reader of the state file finds."""
    try:
        with StateFile.open(str(root / "state.json")) as file:
            state = file.read()
    except FileNotFoundError:
        return None
    return state.document, tuple(state.records)


def check_state(root: Path, run: Run) -> None:
    """Check that a reader finds the state after the last acknowledged step, or after the one that was under way."""
    done = len(run.acknowledged)
    found = read_state(root)
    if found not in _READ[done : done + 2]:
        raise ViolationError(f"after {done} steps a reader finds {found}")
    surplus = [path for path in read_tree(root) if path not in ("state.json", "state.json.log")]
    if surplus and not all(path.startswith(".state.json.") and run.fault is not Fault.ERROR for path in surplus):
        raise ViolationError(f"it left {surplus}")


def go_on(root: Path) -> None:
    """Go on with the state file where there is one: append to it and fold it."""
    if read_state(root) is None:
        (root / "state.json.log").unlink(missing_ok=True)
        StateFile.create(str(root / "state.json"), {"plan": "old"}).close()
    with StateFile.open(str(root / "state.json")) as file:
        before = list(file.read().records)
        file.append({"step": 9})
        if list(file.read().records) != [*before, {"step": 9}]:
            raise ViolationError("a record that was appended is not the last one")
        file.fold({"plan": "end"})
    if read_state(root) != ({"plan": "end"}, ()):
        raise ViolationError("records are left after they were folded in")


STATE: Final = Scenario(
    name="state",
    program=f"""
from berth.durable.state import StateFile
begin()
file = StateFile.create(os.path.join(root, "state.json"), {{"plan": "old"}})
done("created")
file.append({_RECORDS[0]!r})
done("appended")
file.append({_RECORDS[1]!r})
done("appended")
file.fold({{"plan": "new"}})
done("folded")
""",
    check=check_state,
    recover=go_on,
)

SCENARIOS: Final = (RETIRE, PUBLISH, PROBE, WRITE, RECLAIM, STATE)

# --- what the sweep has to catch -------------------------------------------------------------------------------------

_NO_SYNC: Final = """
import os, stat
sync = os.fsync
os.fsync = lambda fd: None if stat.{kind}(os.fstat(fd).st_mode) else sync(fd)
"""
_SYNC_AGAIN: Final = """
sync = os.fsync
def sync_again(fd):
    try: sync(fd)
    except OSError: sync(fd)
os.fsync = sync_again
"""


def without_directory_sync(scenario: Scenario) -> Scenario:
    """The scenario on a berth that syncs no directory."""
    return replace(scenario, program=_NO_SYNC.format(kind="S_ISDIR") + scenario.program)


def without_file_sync(scenario: Scenario) -> Scenario:
    """The scenario on a berth that syncs no file."""
    return replace(scenario, program=_NO_SYNC.format(kind="S_ISREG") + scenario.program)


def with_retirement(text: str) -> Scenario:
    """The scenario `retire` with other lines in place of the retirement."""
    retirement = f"epoch.retire({RETIREMENT!r})\n"
    assert retirement in RETIRE.program
    return replace(RETIRE, program=RETIRE.program.replace(retirement, text))


#: It deletes the epoch where it has to retire it.
DELETES: Final = with_retirement("import shutil; shutil.rmtree(epoch.path)\n")
#: Its probe bears a name that the next start does not know.
MISNAMES_PROBE: Final = replace(
    PROBE, program="from berth.epoch import names\nnames.PROBE_PREFIX = '.trial-'\n" + PROBE.program
)
#: It writes into the file itself.
OVERWRITES: Final = replace(
    WRITE,
    program=f"""
begin()
with open(os.path.join(root, "file"), "wb") as file:
    file.write({NEW!r})
    file.flush()
    os.fsync(file.fileno())
done("wrote")
""",
)
#: It publishes with a second name, and removes the first afterwards.
LINKS: Final = replace(
    PUBLISH,
    program=PUBLISH.program.replace(
        "epoch.publish(",
        """
def publish(name, dir_fd, as_name):
    os.link(name, as_name, src_dir_fd=epoch.fd, dst_dir_fd=dir_fd)
    os.fsync(dir_fd)
    os.unlink(name, dir_fd=epoch.fd)
    os.fsync(epoch.fd)
publish(""",
    ),
)
#: It leaves its temporary behind when it fails.
LEAVES_TEMPORARY: Final = replace(
    WRITE,
    program="from berth.durable import files\nfiles._unlink_if_there = lambda path, dir_fd: None\n" + WRITE.program,
)
#: It tries a failed fsync once more, which the kernel answers with success.
SYNCS_AGAIN: Final = replace(WRITE, program=_SYNC_AGAIN + WRITE.program)
