"""`berth doctor` as a user meets it: options, exit codes, what is printed where."""

import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import berth
from berth.cli.doctor import command
from berth.cli.main import VERBS

DOCTOR = [sys.executable, "-m", "berth", "doctor"]
SOURCES = Path(berth.__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{SOURCES}:{os.environ.get('PYTHONPATH', '')}"}


def doctor(*options: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DOCTOR, *options], capture_output=True, text=True, env={**ENVIRONMENT, **changes}, timeout=60
    )


def test_the_menu_says_what_the_verb_says() -> None:
    assert command.short_help == VERBS["doctor"][1]


def test_json_is_one_document() -> None:
    done = doctor("--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert list(found) == ["schema_version", "berth", "kernel", "abilities"]
    assert (found["berth"], found["kernel"]) == (berth.__version__, os.uname().release)
    assert all(list(ability) == ["name", "level", "why", "mend"] for ability in found["abilities"])


def test_a_pipe_gets_one_aligned_line_for_each_ability_and_no_mark() -> None:
    done = doctor()
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    abilities = [line for line in lines if not line.startswith("    ")]
    assert len(abilities) == 9
    assert {line[15:17] for line in abilities} == {"  "}
    assert {line[17:32].strip() for line in abilities} <= {"works", "works with less", "does not"}
    assert "\033" not in done.stdout
    assert last.endswith(f" (berth {berth.__version__}, Linux {os.uname().release}).")


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_a_terminal_gets_marks_and_lines_that_fit(tmp_path: Path, no_colour: str) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 64, 0, 0))
    changes = {"NO_COLOR": no_colour, "TERM": "xterm"}
    environment = {key: value for key, value in {**ENVIRONMENT, **changes}.items() if key not in ("COLUMNS", "LINES")}
    with subprocess.Popen([*DOCTOR, "--fs", str(tmp_path)], stdout=theirs, env=environment) as process:
        os.close(theirs)
        text = read_all(ours)
    os.close(ours)
    assert process.returncode == 0
    assert text.startswith("+ file system  works  in" if no_colour else "\033[32m+\033[0m file system  works  in")
    plain = text.replace("\033[32m", "").replace("\033[0m", "").split("\r\n")
    assert len(plain) > 3
    assert all(len(line) < 64 or str(tmp_path) in line for line in plain)
    assert plain[1].startswith(" " * len("+ file system  works  "))


def read_all(terminal: int) -> str:
    data = b""
    while True:
        try:
            data += os.read(terminal, 4096)
        except OSError:  # EIO: the last process that had the terminal open has closed it
            return data.decode()


def test_fs_looks_at_one_directory_and_leaves_nothing(tmp_path: Path) -> None:
    done = doctor("--fs", str(tmp_path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (ability,) = json.loads(done.stdout)["abilities"]
    assert (ability["name"], ability["level"]) == ("file system", "works")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("accepted", "code", "level"), [("0", 5, "does not"), ("1", 0, "works with less")])
def test_fs_that_keeps_nothing_works_where_that_is_accepted(
    small_tmpfs: Path, accepted: str, code: int, level: str
) -> None:
    done = doctor("--fs", str(small_tmpfs), "--json", BERTH_ALLOW_VOLATILE=accepted)
    assert (done.returncode, done.stderr) == (code, "")
    (ability,) = json.loads(done.stdout)["abilities"]
    assert (ability["name"], ability["level"]) == ("file system", level)
    assert "tmpfs" in ability["why"]
    assert os.listdir(small_tmpfs) == []


def test_fs_takes_a_relative_path_and_a_name_that_is_not_text(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/\xff\x1b[31m"
    os.mkdir(odd)
    done = subprocess.run([*DOCTOR, "--fs", b"\xff\x1b[31m"], capture_output=True, env=ENVIRONMENT, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\xff" not in done.stdout
    assert b"\x1b" not in done.stdout


@pytest.mark.parametrize("name", ["file", "missing", "missing/below", ""])
def test_fs_refuses_what_is_no_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / name) if name else ""
    done = doctor("--fs", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert repr(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_fs_refuses_in_json_too() -> None:
    done = doctor("--fs", "/dev/null", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["name"] == "bad-directory"


def test_fs_that_cannot_hold_work_state_is_5() -> None:
    done = doctor("--fs", "/proc")
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout.startswith("file system  does not  nothing can be made in '/proc': ")
    document = doctor("--fs", "/proc", "--json")
    assert document.returncode == 5
    assert json.loads(document.stdout)["abilities"][0]["level"] == "does not"


def test_bad_options_and_a_closed_pipe() -> None:
    assert doctor("--no-such").returncode == 2
    assert doctor("argument").returncode == 2
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*DOCTOR, "--fs", "/tmp"], stdout=write, stderr=subprocess.PIPE, env=ENVIRONMENT)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_encoding_that_shows_little(tmp_path: Path) -> None:
    directory = tmp_path / "Zürich"
    directory.mkdir()
    done = doctor("--fs", str(directory), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Z\\xfcrich" in done.stdout
