from itertools import pairwise

import pytest

from berth.sandbox import policy
from berth.sandbox.policy import Abilities, Channels, Operation, SystemLayout

LAYOUT = SystemLayout(
    directories=("/usr", "/opt-lib"), links={"/bin": "usr/bin", "/lib64": "usr/lib64"}, files=("/etc/ld.so.cache",)
)
ETC = {"/etc/passwd": 20, "/etc/group": 21, "/etc/hosts": 22}
FULL = Channels(workspace=10, etc=ETC, gate=11, status=12)


def words(
    channels: Channels = FULL, abilities: Abilities | None = None, variables: dict[str, str] | None = None
) -> list[str]:
    listed = policy.operations(LAYOUT, abilities or Abilities(), channels, variables or {})
    return policy.arguments(listed, ["command", "--argument"])


def has(found: list[str], *wanted: str) -> bool:
    """Say whether these words stand next to each other."""
    return any(tuple(found[at : at + len(wanted)]) == wanted for at in range(len(found)))


def test_command_stands_behind_two_dashes() -> None:
    """A command that begins with a dash is never an option of bubblewrap."""
    found = policy.arguments([Operation(("--bind", "/a", "/b"), "why")], ["--bind", "/", "/"])
    assert found == ["--bind", "/a", "/b", "--", "--bind", "/", "/"]
    assert words()[-3:] == ["--", "command", "--argument"]
    assert words().count("--") == 1


@pytest.mark.parametrize(
    "option",
    [
        ("--unshare-user",),
        ("--unshare-pid",),
        ("--unshare-net",),
        ("--unshare-ipc",),
        ("--unshare-uts",),
        ("--new-session",),
        ("--die-with-parent",),
        ("--clearenv",),
        ("--cap-drop", "ALL"),
        ("--uid", "1000"),
        ("--gid", "1000"),
        ("--dev", "/dev"),
        ("--tmpfs", "/tmp"),
        ("--disable-userns",),
        ("--proc", "/proc"),
        ("--remount-ro", "/"),
        ("--bind-fd", "10", "/workspace"),
        ("--chdir", "/workspace"),
        ("--block-fd", "11"),
        ("--json-status-fd", "12"),
        ("--ro-bind", "/usr", "/usr"),
        ("--ro-bind", "/opt-lib", "/opt-lib"),
        ("--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"),
        ("--symlink", "usr/bin", "/bin"),
        ("--ro-bind-data", "20", "/etc/passwd"),
    ],
)
def test_option_is_given(option: tuple[str, ...]) -> None:
    assert has(words(), *option)


def test_workspace_is_all_that_is_bound_for_writing() -> None:
    found = words()
    assert [after for before, after in pairwise(found) if before in ("--bind", "--bind-fd", "--dev-bind")] == ["10"]


def test_network_and_host_are_never_shared() -> None:
    assert not {"--share-net", "--bind-try", "--dev-bind", "--cap-add", "--keep-open-fds"} & set(words())


def test_order_of_what_hides_and_what_shows() -> None:
    """A later mount covers an earlier one: the root is made read-only when everything is in it."""
    found = words(variables={"A": "1"})
    positions = [found.index(word) for word in ("--unshare-user", "--ro-bind", "--ro-bind-data", "--dev", "--bind-fd")]
    positions.append(len(found) - 1 - found[::-1].index("--remount-ro"))
    assert positions == sorted(positions)
    assert found[positions[-1] + 1] == "/"
    assert found.index("--clearenv") < found.index("--setenv")


def test_without_a_workspace_or_channels() -> None:
    found = words(Channels(workspace=None, etc=ETC))
    assert not {"--bind-fd", "--chdir", "--block-fd", "--json-status-fd"} & set(found)


def test_weaker_forms_are_exactly_weaker() -> None:
    full = words()
    without_userns = words(abilities=Abilities(disable_userns=False))
    assert [word for word in full if word != "--disable-userns"] == without_userns
    without_proc = words(abilities=Abilities(fresh_proc=False))
    assert not has(without_proc, "--proc", "/proc")
    assert has(without_proc, "--ro-bind", "/proc", "/proc")


def test_variables_are_set_one_by_one_and_sorted() -> None:
    found = words(variables={"B": "two words", "A": "--not-an-option"})
    first = found.index("--setenv")
    assert found[first : first + 6] == ["--setenv", "A", "--not-an-option", "--setenv", "B", "two words"]


@pytest.mark.parametrize("terminal", [None, "", "xterm-256color"])
def test_environment_is_rebuilt(terminal: str | None) -> None:
    found = policy.environment({"BERTH_RUN": "mark"}, terminal=terminal)
    assert found["HOME"] == found["PWD"] == "/workspace"
    assert found["BERTH_RUN"] == "mark"
    assert found.get("TERM") == (terminal or None)
    assert set(found) - {"TERM"} == {"BERTH_RUN", "HOME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER"}
    assert all(directory.startswith("/") for directory in found["PATH"].split(":"))


def test_account_files_name_the_identity_inside() -> None:
    assert set(policy.ETC_FILES) == set(ETC)
    assert f"berth:x:{policy.INSIDE_ID}:{policy.INSIDE_ID}:" in policy.ETC_FILES["/etc/passwd"]
    assert all(content.endswith("\n") for content in policy.ETC_FILES.values())


def test_record_lists_what_is_readable() -> None:
    assert LAYOUT.read_only == ("/usr", "/opt-lib", "/etc/ld.so.cache")


def test_every_option_says_why() -> None:
    for operation in policy.operations(LAYOUT, Abilities(), FULL, {"A": "1"}):
        assert operation.arguments[0].startswith("--")
        assert len(operation.reason) > 5
        assert operation.describe() == f"{' '.join(operation.arguments)}: {operation.reason}"
