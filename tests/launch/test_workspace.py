import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.errors import MalformedError
from berth.launch.workspace import Workspace, open_host_workspace, open_sandbox_workspace

# Opens the workspace argv[2] of kind argv[1] as another user, and prints the name of the error.
OPEN = """
from berth.errors import MalformedError
from berth.launch.workspace import open_host_workspace, open_sandbox_workspace
try:
    if sys.argv[1] == "host": open_host_workspace(sys.argv[2])
    else: open_sandbox_workspace(sys.argv[2], state_root="/nonexistent/state")
except MalformedError as error: print(error.name, error.message, sep="\\n")
else: print("opened\\n")
"""


@pytest.fixture
def no_leak() -> Iterator[None]:
    """Check that the test leaves no descriptor open."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def opened(workspace: Workspace) -> Workspace:
    """Check that the workspace is what it says, and close it."""
    status = os.stat(workspace.path)
    assert os.path.samestat(os.fstat(workspace.fd), status)
    assert (workspace.owner, workspace.group) == (status.st_uid, status.st_gid)
    assert not os.get_inheritable(workspace.fd)
    os.close(workspace.fd)
    return workspace


def refused(path: str | Path, *, state_root: str | Path = "/nonexistent/state") -> MalformedError:
    with pytest.raises(MalformedError) as caught:
        open_sandbox_workspace(str(path), state_root=str(state_root))
    assert repr(os.path.abspath(path)) in caught.value.message
    assert caught.value.fix
    return caught.value


pytestmark = pytest.mark.usefixtures("no_leak")


# --- sandbox ---------------------------------------------------------------------------------------------------------


def test_ordinary_directory(tmp_path: Path) -> None:
    path = tmp_path / "a" / "job"
    path.mkdir(parents=True)
    assert opened(open_sandbox_workspace(str(path), state_root=str(tmp_path / "state"))).path == str(path)
    assert opened(open_sandbox_workspace(f"{path}/../job/", state_root=str(tmp_path / "state"))).path == str(path)


def test_relative_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    assert opened(open_sandbox_workspace("work", state_root="/nonexistent/state")).path == str(tmp_path / "work")


def test_root_directory() -> None:
    error = refused("/")
    assert (error.name, error.message.rsplit(": ", 1)[1]) == ("unsafe-workspace", "it is /")


@pytest.mark.parametrize(
    "path", ["/usr", "/etc", "/proc", "/dev", "/sys", "/run", "/usr/share", "/proc/self", "/dev/shm"]
)
def test_system_directory(path: str) -> None:
    if os.path.realpath(path) != path and path != "/proc/self":
        pytest.skip(f"{path} is a link here")
    assert refused(path).name in ("unsafe-workspace", "workspace-link")


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "homes" / "me"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    error = refused(home)
    assert (error.name, "it is a home directory" in error.message) == ("unsafe-workspace", True)
    error = refused(tmp_path / "homes")
    assert (error.name, f"it holds {home}" in error.message) == ("unsafe-workspace", True)
    opened(open_sandbox_workspace(str(home / "work"), state_root="/nonexistent/state"))


def test_home_of_the_account_where_the_variable_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = os.path.realpath(os.path.expanduser(f"~{os.getuid()}" if os.getuid() else "~root"))
    monkeypatch.setenv("HOME", str(tmp_path))
    if not os.path.isdir(home):
        pytest.skip("this account has no home directory")
    assert refused(home).name == "unsafe-workspace"


def test_home_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$HOME is reached through a link; the directory itself is refused all the same."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    error = refused(tmp_path / "real")
    assert (error.name, "under another name" in error.message) == ("unsafe-workspace", True)


@pytest.mark.parametrize("where", ["", "records", ".standalone-work-x/deep"])
def test_inside_the_state_root(tmp_path: Path, where: str) -> None:
    state = tmp_path / "state"
    (state / where).mkdir(parents=True)
    error = refused(state / where, state_root=state)
    assert (error.name, str(state) in error.message.split(": ", 1)[1]) == ("unsafe-workspace", True)


def test_state_root_inside_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "work" / "deep" / "state").mkdir(parents=True)
    error = refused(tmp_path / "work", state_root=tmp_path / "work" / "deep" / "state")
    assert (error.name, "it holds" in error.message) == ("unsafe-workspace", True)


def test_state_root_that_is_given_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "records").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    for path in (tmp_path / "real", tmp_path / "real" / "records", tmp_path):
        assert refused(path, state_root=tmp_path / "link").name == "unsafe-workspace"


def test_name_that_only_begins_like_the_state_root(tmp_path: Path) -> None:
    (tmp_path / "state-of-mind").mkdir()
    opened(open_sandbox_workspace(str(tmp_path / "state-of-mind"), state_root=str(tmp_path / "state")))


@pytest.mark.parametrize("where", ["link", "link/below", "link/below/deep"])
def test_link_on_the_way(tmp_path: Path, where: str) -> None:
    (tmp_path / "real" / "below" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    error = refused(tmp_path / where)
    assert error.name == "workspace-link"
    assert repr(str(tmp_path / "link")) in error.message
    assert error.fix == f"Give the real path: {tmp_path / where.replace('link', 'real')}"


@pytest.mark.parametrize("kind", ["file", "missing", "below a file", "below missing", "fifo"])
def test_what_is_no_directory(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    error = refused(
        tmp_path / kind.replace("below a ", "").replace("below ", "") / ("below" if "below" in kind else "")
    )
    assert error.name == "bad-workspace"


@pytest.mark.parametrize("kind", ["host", "sandbox"])
@pytest.mark.parametrize("mode", [0o000, 0o600])
def test_directory_that_may_not_be_entered(
    readable_children, other_user, open_directory: Path, kind: str, mode: int
) -> None:
    """Its own owner, too, is refused where the mode says so, and so is somebody below such a directory."""
    (open_directory / "mine" / "below").mkdir(parents=True)
    (open_directory / "theirs").mkdir(mode=0o700)
    os.chown(open_directory / "mine", 65534, 65534)
    (open_directory / "mine").chmod(mode)
    for path in ("mine", "mine/below", "theirs"):
        printed = readable_children.run(OPEN, kind, open_directory / path, prefix=other_user)
        assert printed.splitlines()[0] == "bad-workspace", path
        assert "Permission denied" in printed


def test_directory_that_may_not_be_read(readable_children, other_user, open_directory: Path) -> None:
    """A command on the host may work in a directory that it cannot list; a sandbox is not made on one."""
    (open_directory / "mine").mkdir()
    os.chown(open_directory / "mine", 65534, 65534)
    (open_directory / "mine").chmod(0o300)
    printed = readable_children.run(OPEN, "sandbox", open_directory / "mine", prefix=other_user)
    assert printed.splitlines()[0] == "bad-workspace"
    assert readable_children.run(OPEN, "host", open_directory / "mine", prefix=other_user) == "opened\n\n"


# --- host ------------------------------------------------------------------------------------------------------------


def test_host_workspace_is_just_a_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for path in (tmp_path / "real", tmp_path / "link", Path("/"), Path("/usr")):
        assert opened(open_host_workspace(str(path))).path == str(path)


@pytest.mark.parametrize("kind", ["file", "missing", "dangling link"])
def test_host_workspace_that_is_no_directory(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling link").symlink_to("nowhere")
    with pytest.raises(MalformedError) as caught:
        open_host_workspace(str(tmp_path / kind))
    assert caught.value.name == "bad-workspace"
    assert repr(str(tmp_path / kind)) in caught.value.message
