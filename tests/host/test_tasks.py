import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from berth.errors import ForbiddenError, MalformedError
from berth.host.cpuset import CpuSet
from berth.host.tasks import (
    MAX_PASSES,
    ProcessFacts,
    clock_ticks_per_second,
    hidepid,
    list_pids,
    read_environment,
    read_pages_by_node,
    read_process,
)
from berth.linux.process import START, parse_stat

LINE = "1 2 3 0 -1 4194304 0 0 0 0 7 11 0 0 20 0 1 0 {start} 0 0 0 {code} 0 0 0 0 0 0 0 0 0 0 0 17 5 0 3 0 0 0 0 0 0 0"
STATUS = (
    "Name:\tx\nTgid:\t{tgid}\nUid:\t1000\t0\t0\t0\nNSpid:\t70\t1\nCapEff:\t0000000000800020\nCpus_allowed:\t0000000f\n"
    "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0,2\nvoluntary_ctxt_switches:\t8\nnonvoluntary_ctxt_switches:\t9\n"
)


def stat(pid: int, *, name: str = "x", state: str = "S", start: int = 100, code: int = 4096) -> str:
    return f"{pid} ({name}) {state} {LINE.format(start=start, code=code)}\n"


def process_files(
    pid: int = 70, *, tids: tuple[int, ...] = (70,), cmdline: str = "a\0b c\0", **fields
) -> dict[str, str]:
    """Return the files of one process in the kernel's formats."""
    files = {f"/proc/{pid}/stat": stat(pid, **fields), f"/proc/{pid}/cmdline": cmdline}
    files[f"/proc/{pid}/status"] = STATUS.format(tgid=pid)
    for tid in tids:
        files[f"/proc/{pid}/task/{tid}/stat"] = stat(tid, **fields)
        files[f"/proc/{pid}/task/{tid}/status"] = STATUS.format(tgid=pid)
    return files


# --- this machine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts(zoo) -> dict[int, ProcessFacts]:
    return {animal["pid"]: read_process(animal["pid"]) for animal in zoo.animals}


def test_two_hundred_processes_are_what_they_say(zoo, facts: dict[int, ProcessFacts]) -> None:
    assert len(facts) >= 200
    for animal in zoo.animals:
        if animal["kind"] == "zombie":
            continue
        found = facts[animal["pid"]]
        main = found.main
        assert main is not None
        assert (found.ppid, found.uid, found.comm) == (animal["ppid"], animal["uid"], animal["name"])
        assert (main.tid, main.name, list(main.cpus_allowed)) == (animal["pid"], animal["name"], animal["cpus"])
        assert main.policy == animal["policy"]
        assert main.movable
        assert not found.kernel_thread
        assert found.settled
        assert found.arguments[-1] == "last word"
        assert main.start_ticks == found.start_ticks
        assert CpuSet.of([main.current_cpu or 0]) <= CpuSet.of(os.sched_getaffinity(0))


def test_every_thread_has_its_own_mask_and_name(zoo, facts: dict[int, ProcessFacts]) -> None:
    for animal in zoo.of("threads"):
        own = [(animal["pid"], animal["name"], animal["cpus"])]
        own += sorted((thread["tid"], thread["name"], thread["cpus"]) for thread in animal["threads"])
        assert [(t.tid, t.name, list(t.cpus_allowed)) for t in facts[animal["pid"]].threads] == sorted(own)


def test_kinds_are_told_apart(zoo, facts: dict[int, ProcessFacts]) -> None:
    def kind(name: str) -> list[ProcessFacts]:
        return [facts[animal["pid"]] for animal in zoo.of(name)]

    assert {(found.state, found.arguments, len(found.threads)) for found in kind("zombie")} == {("Z", (), 1)}
    assert {found.comm for found in kind("renamed")} == {"a) R 1 (b"}
    assert {len(found.threads) for found in kind("threads")} == {4}
    assert {found.main.policy_name for found in kind("plain")} == {"SCHED_OTHER"}
    for name, policy in (("batch", "SCHED_BATCH"), ("idle", "SCHED_IDLE"), ("fifo", "SCHED_FIFO")):
        assert {found.main.policy_name for found in kind(name)} <= {policy}
    assert {found.cap_effective for found in kind("capable")} <= {1 << 5 | 1 << 23}
    assert {(found.uid, found.cap_effective) for found in kind("user")} <= {(65534, 0)}


def test_numbers_in_every_pid_namespace_are_known(zoo) -> None:
    namespaced = zoo.of("namespace")
    if not namespaced:
        pytest.skip("pid namespaces cannot be made here")
    for animal in namespaced:
        assert read_process(animal["inner"]).nspid_chain == (animal["inner"], animal["inner_number"] or 1)
        assert read_process(animal["pid"]).nspid_chain == (animal["pid"],)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset (util-linux) is not installed")
def test_masks_agree_with_taskset(zoo, facts: dict[int, ProcessFacts]) -> None:
    for pid, found in facts.items():
        done = subprocess.run(["taskset", "-acp", str(pid)], capture_output=True, text=True, check=True)
        printed = {
            int(tid): CpuSet.parse_list(mask)
            for tid, mask in re.findall(r"pid (\d+)'s current affinity list: (.*)", done.stdout)
        }
        assert {thread.tid: thread.cpus_allowed for thread in found.threads} == printed


@pytest.mark.skipif(shutil.which("ps") is None, reason="ps (procps) is not installed")
def test_all_threads_agree_with_ps(zoo, facts: dict[int, ProcessFacts]) -> None:
    columns = "tid=,pid=,ppid=,ruid=,class=,state="
    done = subprocess.run(["ps", "-eLo", columns], capture_output=True, text=True, check=True)
    letters = {"SCHED_OTHER": "TS", "SCHED_BATCH": "B", "SCHED_IDLE": "IDL", "SCHED_FIFO": "FF"}
    rows = [line.split() for line in done.stdout.splitlines()]
    assert {(*row[:5], row[5] == "Z") for row in rows if int(row[1]) in facts} == {
        (str(t.tid), str(found.pid), str(found.ppid), str(found.uid), letters[t.policy_name], t.state == "Z")
        for found in facts.values()
        for t in found.threads
    }


def test_the_kernels_own_threads_are_told_apart(as_root: None) -> None:
    found = {}
    for pid in list_pids():
        try:
            found[pid] = read_process(pid)
        except ForbiddenError:
            continue
    kernel = [process for process in found.values() if process.kernel_thread]
    if not kernel:
        pytest.skip("no kernel thread is visible in this pid namespace")
    assert all(process.arguments == () for process in kernel)
    assert {process.ppid for process in kernel} <= {0, 2}
    assert not found[os.getpid()].kernel_thread
    fixed = [process for process in kernel if not process.main.movable]
    assert fixed, "each CPU has kernel threads that cannot be moved"
    process = fixed[0]
    with pytest.raises(OSError, match="Invalid argument"):
        os.sched_setaffinity(process.pid, process.main.cpus_allowed)


def test_this_process_is_listed_and_knows_its_times() -> None:
    assert os.getpid() in list_pids()
    assert list_pids() == sorted(list_pids())
    before = os.times()
    main = read_process(os.getpid()).threads
    after = os.times()
    ticks = sum(thread.user_ticks + thread.system_ticks for thread in main)
    per_second = clock_ticks_per_second()
    assert before.user + before.system - 1 <= ticks / per_second <= after.user + after.system + 1


def test_the_environment_of_another_user_is_not_readable(readable_children, other_user: list[str]) -> None:
    me = str(os.getpid())
    assert readable_children.run(
        f"import os\nfrom berth.host.tasks import *\nprint(read_environment({me}), read_pages_by_node({me}))\n"
        "print(read_environment(os.getpid())['BERTH_X'])",
        prefix=other_user,
        env={**os.environ, "BERTH_X": "a=b"},
    ).split() == ["None", "None", "a=b"]


def test_the_environment_is_the_one_the_program_began_with(children) -> None:
    child = children.start("print(flush=True); sys.stdin.read()", env={"A": "1", "B": "x=y", "C": ""})
    child.stdout.readline()
    assert read_environment(child.pid) == {"A": "1", "B": "x=y", "C": ""}
    child.kill()
    child.wait()
    assert read_environment(child.pid) is None


def test_pages_are_those_that_the_process_touches(children) -> None:
    child = children.start(
        "import mmap\nprint(flush=True); sys.stdin.readline()\n"
        "m = mmap.mmap(-1, 32 << 20); m.write(b'x' * (32 << 20)); print(flush=True); sys.stdin.readline()"
    )
    child.stdout.readline()
    before = read_pages_by_node(child.pid)
    if before is None:
        pytest.skip("this kernel has no numa_maps")
    child.stdin.write("\n")
    child.stdin.flush()
    child.stdout.readline()
    after = read_pages_by_node(child.pid)
    assert after is not None
    grown = sum(after.values()) - sum(before.values())
    assert 32 << 20 <= grown * 4096 < 80 << 20  # The bytes object that was written may still be there.


# --- gone, hidden, another kind --------------------------------------------------------------------------------------


def test_a_process_that_ended_is_no_process() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    with pytest.raises(ForbiddenError, match=rf"no process {child.pid}: it has ended") as caught:
        read_process(child.pid)
    assert caught.value.name == "no-such-process"


def test_a_thread_is_no_process(zoo) -> None:
    animal = zoo.of("threads")[0]
    with pytest.raises(ForbiddenError, match=f"is a thread of the process {animal['pid']}") as caught:
        read_process(animal["threads"][0]["tid"])
    assert caught.value.name == "no-such-process"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("off", 0, "fine"),
        ("noaccess", 1, "is there, but this user may not read about it: /proc is mounted with hidepid=1"),
        ("invisible", 2, "that this user can see: it has ended, or the option hidepid=2"),
        ("ptraceable", 4, "that this user can see: it has ended, or the option hidepid=4"),
    ],
)
def test_a_hidden_process_is_said_to_be_hidden(
    readable_children, other_user: list[str], option: str, value: int, message: str
) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is not installed")
    script = f'mount -t proc -o hidepid={option} proc /proc && exec "$@"'
    prefix = ["unshare", "--mount", "--", "sh", "-c", script, "sh", *other_user]
    if subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("proc cannot be mounted with this option here")
    code = (
        "from berth.errors import ForbiddenError\nfrom berth.host.tasks import *\nprint(hidepid())\n"
        "try:\n print('fine', read_process(int(sys.argv[1])).uid)\n"
        "except ForbiddenError as error:\n print(error.name, error.message)"
    )
    shown, answer = readable_children.run(code, os.getpid(), prefix=prefix).splitlines()
    assert int(shown) == value
    assert message in answer


@pytest.mark.parametrize(
    ("options", "value"), [("rw", 0), ("rw,gid=5,hidepid=2", 2), ("rw,hidepid=invisible", 2), ("rw,hidepid=1", 1)]
)
def test_the_option_is_read_in_old_and_new_words(tree, options: str, value: int) -> None:
    tree.write(
        {"/proc/self/mountinfo": f"22 1 0:21 / /proc rw - proc proc {options}\n23 1 0:3 / /sys rw - sysfs s rw\n"}
    )
    assert hidepid(tree.root) == value


def test_without_mount_table_or_proc_nothing_is_said_to_be_hidden(tree) -> None:
    assert hidepid(tree.root) == 0
    over = "22 1 0:21 / /proc rw - proc proc rw,hidepid=2\n25 22 0:9 / /proc rw - tmpfs none rw\n"
    tree.write({"/proc/self/mountinfo": over})
    assert hidepid(tree.root) == 0
    tree.write({"/proc/self/mountinfo": "22 1 0:21 / /proc rw - proc proc rw,hidepid=often\n"})
    with pytest.raises(MalformedError, match="hidepid='often'"):
        hidepid(tree.root)


# --- recorded processes ----------------------------------------------------------------------------------------------


def test_reads_every_field(tree) -> None:
    tree.write(process_files(tids=(70, 9, 101), name="x) R 1 (y"))
    found = read_process(70, tree.root)
    assert (found.pid, found.ppid, found.uid, found.comm, found.state) == (70, 1, 1000, "x) R 1 (y", "S")
    assert (found.arguments, found.start_ticks, found.nspid_chain) == (("a", "b c"), 100, (70, 1))
    assert (found.kernel_thread, found.cap_effective, found.settled) == (False, 0x800020, True)
    assert [thread.tid for thread in found.threads] == [9, 70, 101]
    thread = found.threads[2]
    assert (str(thread.cpus_allowed), str(thread.mems_allowed), thread.current_cpu) == ("0-3", "0,2", 5)
    assert (thread.policy_name, thread.user_ticks, thread.system_ticks) == ("SCHED_BATCH", 7, 11)
    assert (thread.voluntary_ctxt_switches, thread.nonvoluntary_ctxt_switches) == (8, 9)
    assert list_pids(tree.root) == [70]


def test_what_the_kernel_does_not_say_is_none(tree) -> None:
    files = process_files()
    bare = "Uid:\t0\t0\t0\t0\nCpus_allowed:\t00000001,00000003\n"
    tree.write(files | {"/proc/70/status": bare, "/proc/70/task/70/status": bare})
    found = read_process(70, tree.root)
    assert (found.nspid_chain, found.cap_effective) == ((), None)
    thread = found.threads[0]
    assert (str(thread.cpus_allowed), thread.mems_allowed, thread.voluntary_ctxt_switches) == ("0-1,32", None, None)


@pytest.mark.parametrize(
    ("cmdline", "arguments"),
    [("", ()), ("a\0", ("a",)), ("sh\0-c\0\0", ("sh", "-c", "")), ("title", ("title",)), ("\0", ("",))],
)
def test_arguments_are_kept_exactly(tree, cmdline: str, arguments: tuple[str, ...]) -> None:
    tree.write(process_files(cmdline=cmdline))
    assert read_process(70, tree.root).arguments == arguments


def test_bytes_that_are_no_text_can_go_into_json(tree) -> None:
    tree.write(process_files())
    (tree.path / "proc/70/stat").write_bytes(b"70 (\xff\n) S " + LINE.format(start=1, code=1).encode())
    (tree.path / "proc/70/cmdline").write_bytes(b"\xe4\0")
    found = read_process(70, tree.root)
    assert (found.comm, found.arguments) == ("\\xff\n", ("\\xe4",))


def test_an_unknown_policy_is_its_number(tree) -> None:
    tree.write(process_files())
    path = tree.path / "proc/70/task/70/stat"
    path.write_text(path.read_text().replace(" 17 5 0 3 ", " 17 5 0 9 "))
    assert read_process(70, tree.root).threads[0].policy_name == "9"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stat", ""),
        ("stat", "70 (x) S 1 2\n"),
        ("task/70/stat", "70 x S\n"),
        ("status", "Name:\tx\n"),
        ("task/70/status", "Name:\tx\n"),
        ("task/70/status", "Cpus_allowed_list:\t0-\n"),
    ],
)
def test_what_is_malformed_is_named(tree, name: str, text: str) -> None:
    tree.write(process_files() | {f"/proc/70/{name}": text})
    with pytest.raises(MalformedError, match=f"/proc/70/{name}"):
        read_process(70, tree.root)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=15).filter(lambda name: b"\0" not in name))
def test_any_name_is_found_in_the_stat_file(name: bytes) -> None:
    line = parse_stat(b"70 (" + name + b") S " + LINE.format(start=12345, code=1).encode())
    assert (line.name, line.number(START)) == (name, 12345)


# --- what changes while it is read: a fifo lets the test act in the middle of a reading -------------------------------


@pytest.fixture
def meanwhile(tree) -> Iterator[Callable[[str, Callable[[], None]], None]]:
    """Return a function that makes a file a fifo once: when it is opened, something happens, then it is read."""
    threads = []

    def arrange(name: str, act: Callable[[], None]) -> None:
        path = tree.path / name.lstrip("/")
        content = path.read_text()
        path.unlink()
        os.mkfifo(path)

        def serve() -> None:
            with open(path, "w") as pipe:
                act()
                path.unlink(missing_ok=True)
                if path.parent.is_dir():
                    path.write_text(content)
                pipe.write(content)

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()

    yield arrange
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "the file was never read"


def grow(tree, meanwhile, first: int, count: int) -> None:
    """Let a thread appear whenever the one before it is read, `count` times."""
    if count:

        def more() -> None:
            tree.write({n: t for n, t in process_files(tids=(first + 1,)).items() if "/task/" in n})
            grow(tree, meanwhile, first + 1, count - 1)

        meanwhile(f"/proc/70/task/{first}/status", more)


def test_threads_that_appear_while_others_are_read_are_found(tree, meanwhile) -> None:
    tree.write(process_files())
    grow(tree, meanwhile, 70, MAX_PASSES - 2)
    found = read_process(70, tree.root)
    assert [thread.tid for thread in found.threads] == list(range(70, 70 + MAX_PASSES - 1))
    assert found.settled


def test_threads_that_never_stop_appearing_are_said_to_be_incomplete(tree, meanwhile) -> None:
    tree.write(process_files())
    grow(tree, meanwhile, 70, MAX_PASSES)
    found = read_process(70, tree.root)
    assert [thread.tid for thread in found.threads] == list(range(70, 70 + MAX_PASSES))
    assert not found.settled


def test_a_thread_that_ends_meanwhile_is_left_out(tree, meanwhile) -> None:
    tree.write(process_files(tids=(70, 71)))
    meanwhile("/proc/70/task/70/status", lambda: shutil.rmtree(tree.path / "proc/70/task/71"))
    assert [thread.tid for thread in read_process(70, tree.root).threads] == [70]


def test_a_process_that_ends_while_it_is_read_is_no_process(tree, meanwhile) -> None:
    tree.write(process_files())
    meanwhile("/proc/70/status", (tree.path / "proc/70/stat").unlink)
    with pytest.raises(ForbiddenError, match="There is no process 70"):
        read_process(70, tree.root)


def test_two_processes_are_never_mixed(tree, meanwhile) -> None:
    tree.write(process_files())
    meanwhile("/proc/70/status", lambda: tree.write({"/proc/70/stat": stat(70, start=101)}))
    with pytest.raises(ForbiddenError, match="There is no process 70"):
        read_process(70, tree.root)


def test_two_programs_of_one_process_are_never_mixed(tree, meanwhile) -> None:
    tree.write(process_files())

    def execute() -> None:
        tree.write(process_files(name="second", code=8192) | {"/proc/70/cmdline": "second\0"})

    meanwhile("/proc/70/task/70/status", execute)  # Read after the first program's arguments.
    found = read_process(70, tree.root)
    assert (found.comm, found.arguments, found.settled) == ("second", ("second",), True)


def test_a_process_that_always_executes_another_program_is_not_settled(tree, meanwhile) -> None:
    tree.write(process_files())

    def execute(times: int) -> None:
        tree.write({"/proc/70/stat": stat(70, code=times)})
        if times < MAX_PASSES:
            again.append(times + 1)

    again: list[int] = []
    path = tree.path / "proc/70/status"
    content = path.read_text()
    path.unlink()
    os.mkfifo(path)

    def serve() -> None:
        for times in range(MAX_PASSES):
            following = tree.path / "proc/70/next"
            os.mkfifo(following)
            with open(path, "w") as pipe:
                execute(times)
                following.replace(path)  # The next reading opens another fifo than this one.
                pipe.write(content)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    found = read_process(70, tree.root)
    thread.join(10)
    assert not thread.is_alive()
    assert not found.settled


# --- environment and memory of recorded processes --------------------------------------------------------------------


def test_environment_takes_the_first_of_equal_names(tree) -> None:
    tree.write(process_files() | {"/proc/70/environ": "A=1\0A=2\0=x\0nothing\0B=\0"})
    assert read_environment(70, tree.root) == {"A": "1", "": "x", "B": ""}
    assert read_environment(71, tree.root) is None


def test_a_zombie_leader_shows_its_environment_through_another_thread(tree) -> None:
    files = process_files(tids=(70, 71)) | {"/proc/70/environ": "", "/proc/70/task/71/environ": "A=1\0"}
    files["/proc/70/stat"] = stat(70, state="Z").replace(" 20 0 1 0 ", " 20 0 2 0 ")
    tree.write(files | {"/proc/70/task/70/environ": ""})
    assert read_environment(70, tree.root) == {"A": "1"}


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        ("", {}),
        ("7f00 default anon=3 dirty=3 N0=2 N8=1 kernelpagesize_kB=4\n", {0: 2, 8: 1}),
        (
            "7f00 default huge anon=2 N0=2 kernelpagesize_kB=2048\n7f10 bind:1 N1=5 kernelpagesize_kB=4\n",
            {0: 1024, 1: 5},
        ),
        ("7f00 default file=/x\\040N0\\0757 anon=1 N1=1 kernelpagesize_kB=64\n", {1: 16}),
        ("7f00 default\n7f10 default heap\n", {}),
        ("7f00 default anon=1 N0=1\n", None),
    ],
)
def test_pages_are_counted_in_one_unit(tree, text: str, pages: dict[int, int] | None) -> None:
    tree.write({"/proc/70/numa_maps": text})
    assert read_pages_by_node(70, tree.root) == pages


def test_pages_are_unknown_without_the_file(tree) -> None:
    assert read_pages_by_node(70, tree.root) is None
    Path(tree.root, "proc/70").mkdir(parents=True)
    assert read_pages_by_node(70, tree.root) is None
