import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from berth.epoch.capability import Accepted
from berth.settings import SYSTEM_FILE, Settings, accepted, default_state_root, load_settings

# Loads the settings with --state-root argv[1], if any, and prints them or the error as JSON.
LOAD = """
import json
sys.path.append({packages!r})
from berth.errors import MalformedError
from berth.settings import load_settings, sandbox_account
try:
    settings = load_settings(state_root=sys.argv[1] if len(sys.argv) > 1 else None)
    epoch = settings.epoch
    found = [settings.state_root, settings.sandbox.user, sandbox_account(settings)]
    if len(sys.argv) > 2: found = [epoch.trust_network, epoch.allow_volatile, epoch.reclaim_at_start]
except MalformedError as error: found = [error.name, error.message, error.fix]
print(json.dumps(found))
""".replace("{packages!r}", repr(os.path.dirname(os.path.dirname(msgspec.__file__))))

Load = Callable[..., Any]


@pytest.fixture
def user_file(open_directory: Path) -> Path:
    """Return the place of an ordinary user's settings file."""
    (open_directory / "config" / "berth").mkdir(parents=True)
    return open_directory / "config" / "berth" / "config.toml"


@pytest.fixture
def load_as_user(readable_children, request: pytest.FixtureRequest, open_directory: Path, user_file: Path) -> Load:
    """Return a function that loads the settings as an ordinary user whose directories are below `open_directory`."""
    prefix = request.getfixturevalue("other_user") if os.geteuid() == 0 else []
    where = {
        "PATH": os.environ["PATH"],
        "HOME": str(open_directory / "home"),
        "XDG_CONFIG_HOME": str(open_directory / "config"),
        "XDG_STATE_HOME": str(open_directory / "state"),
    }
    if os.path.exists(SYSTEM_FILE):
        pytest.skip(f"this machine has a {SYSTEM_FILE} of its own")

    def load(*arguments: str, **environment: str) -> Any:
        return json.loads(
            readable_children.run(LOAD, *arguments, prefix=prefix, env={**where, **environment}, cwd=open_directory)
        )

    packages = os.path.dirname(msgspec.__file__)
    if prefix and subprocess.run([*prefix, "test", "-r", f"{packages}/__init__.py"]).returncode != 0:
        pytest.skip(f"other users may not read {packages}")
    return load


@pytest.fixture
def load_as_root(as_root: None, children, tmp_path: Path) -> Load:
    """Return a function that loads the settings as root, with an /etc that only that process sees."""
    etc = tmp_path / "etc"
    (etc / "berth").mkdir(parents=True)
    for name in ("passwd", "group", "nsswitch.conf"):
        if os.path.exists(f"/etc/{name}"):
            (etc / name).write_bytes(Path(f"/etc/{name}").read_bytes())
    prefix = ["unshare", "--mount", "sh", "-c", f'mount --bind {etc} /etc && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("root may not mount here")

    def load(*arguments: str, **environment: str) -> Any:
        where = {"PATH": os.environ["PATH"], "XDG_CONFIG_HOME": str(tmp_path / "config"), **environment}
        return json.loads(children.run(LOAD, *arguments, prefix=prefix, env=where))

    return load


# --- where they come from --------------------------------------------------------------------------------------------


def test_without_anything(load_as_user: Load, open_directory: Path) -> None:
    assert load_as_user() == [str(open_directory / "state" / "berth"), None, None]
    assert load_as_user(XDG_STATE_HOME="") == [str(open_directory / "home" / ".local" / "state" / "berth"), None, None]


@pytest.mark.parametrize("variable", ["XDG_STATE_HOME", "XDG_CONFIG_HOME"])
def test_relative_base_directory_is_not_used(
    load_as_user: Load, open_directory: Path, user_file: Path, variable: str
) -> None:
    user_file.write_text("state_root = '/from/file'")
    expected = "/from/file" if variable == "XDG_STATE_HOME" else str(open_directory / "state" / "berth")
    assert load_as_user(**{variable: "config" if variable == "XDG_CONFIG_HOME" else "state"})[0] == expected


def test_the_last_wins(load_as_user: Load, user_file: Path) -> None:
    user_file.write_text("state_root = '/from/file'")
    assert load_as_user()[0] == "/from/file"
    assert load_as_user(BERTH_STATE_ROOT="/from/environment")[0] == "/from/environment"
    assert load_as_user("/from/option", BERTH_STATE_ROOT="/from/environment")[0] == "/from/option"
    assert load_as_user(BERTH_STATE_ROOT="")[0] == "/from/file"


def test_relative_option_is_below_the_working_directory(load_as_user: Load, open_directory: Path) -> None:
    assert load_as_user("a/../b")[0] == str(open_directory / "b")


def test_state_root_of_root(load_as_root: Load, tmp_path: Path) -> None:
    assert load_as_root() == ["/var/lib/berth", None, None]


def test_file_of_a_user_is_not_read_for_root(load_as_root: Load, tmp_path: Path) -> None:
    (tmp_path / "config" / "berth").mkdir(parents=True)
    (tmp_path / "config" / "berth" / "config.toml").write_text("state_root = '/from/user'")
    (tmp_path / "etc" / "berth" / "config.toml").write_text("state_root = '/from/system'\n[sandbox]\nuser = 'nobody'\n")
    state_root, user, account = load_as_root()
    assert (state_root, user) == ("/from/system", "nobody")
    assert account[0] > 0


def test_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_STATE_ROOT", "/from/environment")
    assert load_settings().state_root == "/from/environment"
    assert load_settings(state_root="/from/option").state_root == "/from/option"
    assert (default_state_root() == "/var/lib/berth") == (os.geteuid() == 0)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().state_root = "/x"  # type: ignore[misc]


# --- what is wrong with them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("stat_root = '/x'", "perhaps you meant 'state_root'"),
        ("[sandbox]\nusr = 'x'", "perhaps you meant 'user'"),
        ("entirely_else = 1", "entirely_else"),
        ("state_root = 7", "Expected `str"),
        ("sandbox = 'x'", "Expected `object`"),
        ("state_root = ", "is not TOML"),
        ("state_root = '/a'\nstate_root = '/b'", "is not TOML"),
        ("state_root = '\udcff'", "is not TOML"),
    ],
)
def test_wrong_file_is_refused(load_as_user: Load, user_file: Path, content: str, said: str) -> None:
    user_file.write_bytes(content.encode("utf-8", "surrogateescape"))
    name, message, fix = load_as_user()
    assert name == "bad-settings"
    assert said in message
    assert repr(str(user_file)) in message
    assert fix


@pytest.mark.parametrize("value", ["'relative'", "''", "'~/state'", '"/a\\u0000b"'])
def test_state_root_that_is_no_absolute_path(load_as_user: Load, user_file: Path, value: str) -> None:
    user_file.write_text(f"state_root = {value}")
    name, message, _ = load_as_user()
    assert (name, "not an absolute path" in message) == ("bad-settings", True)


def test_wrong_system_file_is_refused_whatever_the_options_say(load_as_root: Load, tmp_path: Path) -> None:
    (tmp_path / "etc" / "berth" / "config.toml").write_text("unknown = 1")
    assert load_as_root("/from/option")[0] == "bad-settings"


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_file_that_others_may_write(load_as_user: Load, user_file: Path, mode: int) -> None:
    user_file.write_text("state_root = '/from/file'")
    user_file.chmod(mode)
    name, message, fix = load_as_user()
    assert (name, f"chmod go-w {user_file}" in fix) == ("bad-settings", True)
    assert "others can write" in message


def test_file_of_another_user(load_as_root: Load, tmp_path: Path) -> None:
    path = tmp_path / "etc" / "berth" / "config.toml"
    path.write_text("state_root = '/from/file'")
    os.chown(path, 65534, 65534)
    assert "others can write" in load_as_root()[1]


@pytest.mark.parametrize("kind", ["directory", "unreadable"])
def test_file_that_cannot_be_read(load_as_user: Load, user_file: Path, kind: str) -> None:
    if kind == "directory":
        user_file.mkdir()
    else:
        user_file.write_text("")
        user_file.chmod(0o000)
    name, message, _ = load_as_user()
    assert (name, "cannot be read" in message) == ("bad-settings", True)


@pytest.mark.parametrize(("user", "said"), [("no-such-user-here", "no such user"), ("root", "names root")])
def test_sandbox_user_that_cannot_be(load_as_user: Load, user_file: Path, user: str, said: str) -> None:
    user_file.write_text(f"[sandbox]\nuser = '{user}'")
    name, message, _ = load_as_user()
    assert (name, said in message) == ("bad-settings", True)


@pytest.mark.parametrize("home", ["", "relative", "/"])
def test_without_a_home_there_is_no_default_state_root(home):
    """It would be made in the current directory, and the next start elsewhere would not find what was left."""
    from berth.errors import MalformedError
    from berth.settings import _base_directory

    before = dict(os.environ)
    os.environ.pop("XDG_STATE_HOME", None)
    os.environ["HOME"] = home
    try:
        if home or os.path.expanduser("~") == "":
            with pytest.raises(MalformedError, match="no home directory"):
                _base_directory("XDG_STATE_HOME", ".local/state")
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- work-state ------------------------------------------------------------------------------------------------------


def test_nothing_is_accepted_and_reclaiming_is_on(load_as_user: Load) -> None:
    assert load_as_user("/root", "epoch") == [False, False, True]


def test_what_is_accepted_comes_from_the_file_and_the_environment(load_as_user: Load, user_file: Path) -> None:
    user_file.write_text("[epoch]\ntrust_network = true\nreclaim_at_start = false\n")
    assert load_as_user("/root", "epoch") == [True, False, False]
    assert load_as_user("/root", "epoch", BERTH_TRUST_NETWORK="0") == [False, False, False]
    assert load_as_user("/root", "epoch", BERTH_TRUST_NETWORK="", BERTH_ALLOW_VOLATILE="YES") == [True, True, False]


@pytest.mark.parametrize("variable", ["BERTH_TRUST_NETWORK", "BERTH_ALLOW_VOLATILE"])
@pytest.mark.parametrize("value", ["2", "maybe", " 1"])
def test_switch_that_is_neither_on_nor_off(load_as_user: Load, variable: str, value: str) -> None:
    name, message, fix = load_as_user("/root", "epoch", **{variable: value})
    assert name == "bad-settings"
    assert f"{variable} is {value!r}" in message
    assert "unset" in fix


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[epoch]\nallow_volatil = true", "perhaps you meant 'allow_volatile'"),
        ("[epoch]\nallow_volatile = 1", "allow_volatile"),
        ("[epoch]\nreclaim_at_start = 'no'", "reclaim_at_start"),
        ("epoch = true", "epoch"),
    ],
)
def test_bad_table_of_work_state(load_as_user: Load, user_file: Path, text: str, says: str) -> None:
    user_file.write_text(text)
    name, message, _ = load_as_user("/root", "epoch")
    assert name == "bad-settings"
    assert says in message


def test_options_add_to_what_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("BERTH_TRUST_NETWORK", "BERTH_ALLOW_VOLATILE"):
        monkeypatch.setenv(variable, "0")
    assert accepted(load_settings(trust_network=True)) == Accepted(network=True)
    assert accepted(load_settings(allow_volatile=True)) == Accepted(volatile=True)
    assert accepted(load_settings()) == Accepted()
