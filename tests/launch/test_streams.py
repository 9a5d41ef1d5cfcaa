"""Standard streams of a sandboxed command: files behind pipes, directories refused."""

import os
import subprocess
import sys

import pytest

from berth.errors import MalformedError
from berth.launch.streams import relay_files

# Streams are the process's own, so each case is a process.
CASE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from berth.launch.streams import relay_files
streams = relay_files(output_to_stderr=sys.argv[2] == "json")
where = dict((number, fd) for fd, number in streams.pairs)
for number in (1, 2):
    os.write(where.get(number, number), f"to {number};".encode())
if 0 in where:
    os.write(where.get(1, 1), os.read(where[0], 100))
streams.finish()
"""


def run_case(mode="plain", **streams):
    source = os.path.dirname(os.path.dirname(sys.modules["berth"].__file__))
    return subprocess.run([sys.executable, "-c", CASE, source, mode], timeout=30, **streams)


def test_files_are_relayed_in_both_directions(tmp_path):
    (tmp_path / "in").write_text("given")
    with (tmp_path / "in").open() as stdin, (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        assert run_case(stdin=stdin, stdout=out, stderr=err).returncode == 0
    assert (tmp_path / "out").read_text() == "to 1;given"
    assert (tmp_path / "err").read_text() == "to 2;"


def test_one_file_for_both_outputs_keeps_their_order(tmp_path):
    with (tmp_path / "log").open("w") as log:
        run_case(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    assert (tmp_path / "log").read_text() == "to 1;to 2;"


def test_pipes_are_passed_as_they_are():
    ended = run_case(stdin=subprocess.DEVNULL, capture_output=True)
    assert (ended.stdout, ended.stderr) == (b"to 1;", b"to 2;")


def test_output_can_be_moved_to_standard_error(tmp_path):
    with (tmp_path / "err").open("w") as err:
        ended = run_case("json", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err)
    assert ended.stdout == b""
    assert (tmp_path / "err").read_text() == "to 1;to 2;"


def test_a_directory_is_refused():
    kept, directory = os.dup(0), os.open("/", os.O_RDONLY)
    os.dup2(directory, 0)
    try:
        with pytest.raises(MalformedError, match="directory"):
            relay_files(output_to_stderr=False)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(directory)
