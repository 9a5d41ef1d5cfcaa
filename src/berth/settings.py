"""Settings: from files, the environment and options, the last wins, into one frozen value.

    /etc/berth/config.toml                  for everybody; must belong to root or the caller, unwritable for others
    $XDG_CONFIG_HOME/berth/config.toml      for one user; not read for root
    BERTH_STATE_ROOT, BERTH_TRUST_NETWORK,
    BERTH_ALLOW_VOLATILE                    environment
    --state-root DIR, --trust-network, ...  options of the command

Every key is checked: an unknown one is refused with the nearest that exists, never ignored.
"""

import contextlib
import difflib
import os
import pwd
import stat
import tomllib
from typing import Final

import msgspec

from berth.epoch.capability import Accepted
from berth.errors import MalformedError

#: Settings of the whole machine.
SYSTEM_FILE: Final = "/etc/berth/config.toml"
_KNOWN: Final = "state_root; trust_network, allow_volatile and reclaim_at_start in the table [epoch]; user in [sandbox]"
_YES: Final = ("1", "true", "yes", "on")
_NO: Final = ("0", "false", "no", "off")
_MAX_BYTES: Final = 1 << 20
_ROOT_STATE: Final = "/var/lib/berth"


class EpochSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of work-state, table `[epoch]`."""

    #: Accept a state root on a network or FUSE file system: no other client uses it.
    trust_network: bool = False
    #: Accept a state root that a restart or a power cut empties.
    allow_volatile: bool = False
    #: Make one bounded reclaim step whenever a run starts.
    reclaim_at_start: bool = True


class SandboxSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the sandbox, table `[sandbox]`."""

    #: User name that a sandbox of root becomes where the workspace belongs to root.
    user: str | None = None


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings."""

    #: Directory of records and work-state; absolute.
    state_root: str | None = None
    epoch: EpochSettings = EpochSettings()
    sandbox: SandboxSettings = SandboxSettings()


def load_settings(
    *,
    state_root: str | None = None,
    trust_network: bool = False,
    allow_volatile: bool = False,
    needs_root: bool = True,
) -> Settings:
    """Return the settings of this process.

    Args:
        state_root: Value of `--state-root`, or None.
        trust_network: Whether `--trust-network` was given.
        allow_volatile: Whether `--allow-volatile` was given.
        needs_root: Whether the state root is wanted; it is None where nothing names one and it is not.

    Raises:
        MalformedError: A file is not TOML, holds an unknown key or a wrong value, or others could write it.
    """
    merged: dict[str, object] = {}
    for path in _files():
        _merge(merged, _read(path))
    settings = msgspec.convert(merged, Settings)
    if settings.state_root is not None and not (os.path.isabs(settings.state_root) and "\0" not in settings.state_root):
        raise _bad(f"state_root is {settings.state_root!r}, not an absolute path", "Write the whole path, from /.")
    from_environment = os.environ.get("BERTH_STATE_ROOT")
    if not state_root and from_environment and not os.path.isabs(from_environment):
        raise _bad(f"BERTH_STATE_ROOT is {from_environment!r}, not an absolute path", "Write the whole path, from /.")
    if state_root == "":
        raise _bad("--state-root is empty", "Give a directory, or leave the option out.")
    if state_root and state_root.startswith("~"):
        raise _bad(f"--state-root is {state_root!r}, and only a shell knows what ~ means", "Write it without quotes.")
    chosen = state_root or from_environment or settings.state_root or (default_state_root() if needs_root else None)
    epoch = msgspec.structs.replace(
        settings.epoch,
        trust_network=trust_network or _switch("BERTH_TRUST_NETWORK", settings.epoch.trust_network),
        allow_volatile=allow_volatile or _switch("BERTH_ALLOW_VOLATILE", settings.epoch.allow_volatile),
    )
    return msgspec.structs.replace(settings, state_root=os.path.abspath(chosen) if chosen else None, epoch=epoch)


def accepted(settings: Settings) -> Accepted:
    """Return what the operator accepts of the file system of a state root."""
    return Accepted(network=settings.epoch.trust_network, volatile=settings.epoch.allow_volatile)


def default_state_root() -> str:
    """Return the state root where nothing names one: /var/lib/berth for root, `$XDG_STATE_HOME/berth` for others."""
    if os.geteuid() == 0:
        return _ROOT_STATE
    return os.path.join(_base_directory("XDG_STATE_HOME", ".local/state"), "berth")


def sandbox_account(settings: Settings) -> tuple[int, int, tuple[int, ...]] | None:
    """Return (uid, gid, supplementary gids) of `sandbox.user`, or None where none is set.

    Raises:
        MalformedError: There is no such user, or it is root.
    """
    name = settings.sandbox.user
    if name is None:
        return None
    try:
        account = pwd.getpwnam(name)
    except (KeyError, ValueError):  # unknown, or not a name at all
        raise _bad(f"sandbox.user names {name!r}, and there is no such user", "Create it, or name another.") from None
    if account.pw_uid == 0:
        raise _bad("sandbox.user names root", "Name an ordinary user; that is what the setting is for.")
    return account.pw_uid, account.pw_gid, tuple(os.getgrouplist(name, account.pw_gid))


def settings_directories() -> tuple[str, ...]:
    """Return the directories that hold the settings files of this process, whether they exist or not."""
    return tuple(os.path.dirname(path) for path in _files())


def _switch(variable: str, otherwise: bool) -> bool:
    """Return the switch that an environment variable sets, or `otherwise` where it is not set."""
    value = os.environ.get(variable)
    if not value:
        return otherwise
    if value.lower() in _YES:
        return True
    if value.lower() in _NO:
        return False
    raise _bad(f"{variable} is {value!r}, neither yes nor no", f"Set it to 1 or 0, or unset it: unset {variable}")


def _files() -> list[str]:
    files = [SYSTEM_FILE]
    if os.geteuid() != 0:
        with contextlib.suppress(MalformedError):  # without a home there is no file of one's own
            files.append(os.path.join(_base_directory("XDG_CONFIG_HOME", ".config"), "berth/config.toml"))
    return files


def _base_directory(variable: str, fallback: str) -> str:
    """Return a directory of the XDG base directory specification; relative values are invalid there and not used."""
    value = os.environ.get(variable, "")
    if os.path.isabs(value):
        return value
    home = os.path.expanduser("~")
    if not os.path.isabs(home) or home == "/":
        raise _bad(
            f"there is no home directory to keep {fallback} in (HOME is {os.environ.get('HOME')!r})",
            f"Set HOME, or {variable} to an absolute directory, or give --state-root DIR.",
        )
    return os.path.join(home, fallback)


def _read(path: str) -> dict[str, object]:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
                raise _bad(f"{path!r} is no file of settings", f"It must be a regular file below {_MAX_BYTES} bytes.")
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise _bad(
                    f"others can write the settings file {path!r}",
                    f"Let root or you own it, and take that away: chmod go-w {path}",
                )
            document = tomllib.load(file)
        msgspec.convert(document, Settings)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _bad(f"the settings file {path!r} cannot be read: {error.strerror}", "Repair or remove it.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"the settings file {path!r} is not TOML: {error}", "Repair that line.") from error
    except msgspec.ValidationError as error:
        raise _bad(f"the settings file {path!r}: {error}{_nearest(str(error))}", f"The keys are {_KNOWN}.") from error
    return document


def _merge(into: dict[str, object], new: dict[str, object]) -> None:
    for key, value in new.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        else:
            into[key] = value


def _nearest(message: str) -> str:
    """Return a hint where `message` names an unknown key that resembles a known one."""
    quoted = message.split("`")
    known = [*Settings.__struct_fields__, *EpochSettings.__struct_fields__, *SandboxSettings.__struct_fields__]
    near = difflib.get_close_matches(quoted[1], known, n=1) if len(quoted) > 1 and "unknown field" in message else []
    return f"; perhaps you meant {near[0]!r}" if near else ""


def _bad(message: str, fix: str) -> MalformedError:
    return MalformedError("bad-settings", message, fix)
