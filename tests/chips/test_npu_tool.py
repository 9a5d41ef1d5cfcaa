import os
import select
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from berth.chips.npu_smi import parse_info
from berth.chips.npu_text import NpuSmiError
from berth.chips.npu_tool import INFO, TOPO, Answer, find_npu_smi, run_npu_smi
from berth.chips.npu_topo import parse_topo

#: Waits until the test is over, with the output and `held` open.
WAIT = 'cat "${0%/*}/gate"'
HOLD = 'exec 3>"${0%/*}/held"; printf x >&3'
PATIENCE_S = 30.0
ENVIRONMENT = {"PATH": os.environ["PATH"]}


@pytest.fixture
def fake(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a shell script in the place of npu-smi and returns its path."""

    def write(script: str) -> str:
        path = tmp_path / "npu-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return write


def ask(program: str, *, timeout_s: float = PATIENCE_S, arguments: tuple[str, ...] = INFO, **variables: str) -> Answer:
    return run_npu_smi(arguments, program=program, timeout_s=timeout_s, environment={**ENVIRONMENT, **variables})


@pytest.fixture
def wait_for_all(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Return a function that waits until nothing is left of a script that began with `HOLD`; at the end `WAIT` ends."""
    for name in ("held", "gate"):
        os.mkfifo(tmp_path / name)
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    gate = os.open(tmp_path / "gate", os.O_RDWR)

    def wait() -> None:
        poll = select.poll()
        poll.register(held, 0)  # an end without a writer is told whatever is asked for
        assert os.read(held, 1) == b"x", "no process had it open"
        assert poll.poll(PATIENCE_S * 1000), "a process still has it open"

    yield wait
    os.close(gate)
    os.close(held)


def test_answer(fake) -> None:
    program = fake('printf "   NPU0   CPU Affinity\\nNPU0   X   0-23\\n"; printf "%s" "$*" >&2')
    answer = ask(program, arguments=TOPO)
    assert answer.command == (program, "info", "-t", "topo")
    assert (answer.reason, answer.status) == (None, 0)
    assert answer.text is not None
    assert str(parse_topo(answer.text).rows[0].affinity) == "0-23"


def test_arguments_reach_the_program_as_they_are(fake) -> None:
    assert ask(fake('printf "%s|" "$@"'), arguments=("a b", "$(id)", ";")).text == "a b|$(id)|;|"


def test_environment(fake) -> None:
    answer = ask(fake("env; pwd"), LD_PRELOAD="/nowhere.so", LANGUAGE="zh_CN", LC_ALL="zh_CN.UTF-8", KEPT="1")
    assert answer.text is not None
    lines = answer.text.splitlines()
    assert {"LC_ALL=C", "LANG=C", "KEPT=1", "/"} <= set(lines)
    assert not [line for line in lines if line.startswith(("LD_PRELOAD=", "LANGUAGE="))]
    assert not [line for line in lines if "/nowhere.so" in line]  # the loader would complain


def test_exit_status_does_not_decide(fake) -> None:
    answer = ask(fake('echo "dcmi module initialize failed. ret is -8005"; exit 187'))
    assert (answer.reason, answer.status) == (None, 187)
    assert answer.text is not None
    with pytest.raises(NpuSmiError) as caught:
        parse_info(answer.text)
    assert caught.value.ret == -8005


def test_standard_error_counts_where_there_is_nothing_else(fake) -> None:
    assert ask(fake('echo "Invalid card id." >&2; exit 1')).text == "Invalid card id.\n"
    answer = ask(fake('echo "[ERROR] noise" >&2; echo table'))
    assert answer.text == "table\n"


def test_noise_that_is_no_text(fake) -> None:
    assert ask(fake('printf "\\377\\376|table"')).text == "��|table"


def test_silence_is_a_reason(fake) -> None:
    answer = ask(fake("exit 3"))
    assert (answer.text, answer.status) == (None, 3)
    assert answer.reason is not None
    assert "printed nothing and ended with 3" in answer.reason
    killed = ask(fake("kill -SEGV $$"))
    assert (killed.text, killed.status) == (None, -signal.SIGSEGV)


def test_program_that_hangs_is_killed_with_its_children(fake, wait_for_all) -> None:
    program = fake(f'trap "" TERM; {HOLD}; {WAIT} & printf "| half"; {WAIT}')
    answer = ask(program, timeout_s=1.0)
    assert (answer.text, answer.status) == (None, None)
    assert answer.reason == f"`{program} info`: it did not end within 1 s and was killed"
    wait_for_all()


def test_child_that_keeps_the_output_open_is_not_waited_for(fake, wait_for_all) -> None:
    answer = ask(fake(f"{HOLD}; {WAIT} & echo table"))
    assert (answer.text, answer.status) == ("table\n", 0)
    wait_for_all()


def test_output_that_is_longer_than_a_pipe_is_read_whole(fake) -> None:
    answer = ask(fake("head -c 300000 /dev/zero | tr '\\0' x; echo; echo error >&2"))
    assert answer.text == "x" * 300000 + "\n"


def test_endless_output_is_given_up(fake) -> None:
    answer = ask(fake("exec yes"))
    assert (answer.text, answer.status) == (None, None)
    assert answer.reason is not None
    assert "more than 4 MiB" in answer.reason


def test_output_may_be_closed_early(fake) -> None:
    assert ask(fake("echo table; exec >&- 2>&-; true")).text == "table\n"


@pytest.mark.parametrize("content", ["no program", "#!/nowhere/interpreter\n"])
def test_what_cannot_be_started_is_a_reason(tmp_path: Path, content: str) -> None:
    path = tmp_path / "npu-smi"
    path.write_text(content)
    path.chmod(0o755)
    answer = ask(str(path))
    assert (answer.text, answer.status) == (None, None)
    assert answer.reason is not None
    assert f"{path} cannot be started" in answer.reason
    assert ask(str(tmp_path / "absent")).text is None
    assert ask(str(path), arguments=("a\0b",)).text is None


def test_program_is_found(fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = fake("echo $0")
    assert find_npu_smi({"PATH": f"/nowhere:{os.path.dirname(program)}"}) == program
    monkeypatch.chdir(tmp_path.parent)
    assert find_npu_smi({"PATH": tmp_path.name}) == program  # it is started in another directory
    assert run_npu_smi(INFO, environment={"PATH": tmp_path.name}).text == f"{program}\n"
    os.chmod(program, stat.S_IRUSR)
    if any(os.path.exists(f"{place}/npu-smi") for place in ("/usr/local/bin", "/usr/local/sbin", "/usr/bin")):
        pytest.skip("this machine has a real npu-smi")
    for path in (tmp_path.name, "", "/nowhere"):
        assert find_npu_smi({"PATH": path}) is None
    answer = run_npu_smi(INFO, environment={})
    assert answer.command == ("npu-smi", "info")
    assert answer.reason == "npu-smi is neither in PATH nor in /usr/local/bin, /usr/local/sbin, /usr/bin"
