"""Can a command be shut in here? User namespaces, bubblewrap, seccomp, and who a sandbox of root becomes.

Each is tried in a child of its own, because none of them can be taken back. Sources: user_namespaces(7), unshare(2),
seccomp(2), credentials(7).
"""

import errno
import os
import pwd
import signal
import sys
from collections.abc import Callable
from typing import Final

from berth.doctor.abilities import DOES_NOT, LESS, WORKS, Ability, combine
from berth.doctor.deadline import NoAnswerError, attempt
from berth.errors import AbilityError
from berth.linux import syscalls
from berth.sandbox.bubblewrap import User, find_bubblewrap, probe
from berth.sandbox.fixes import MASKED_PROC_FIX, user_namespace_fix

#: Stands for every ordinary user where root has none to try with; the kernel's own overflow id.
NOBODY: Final[User] = (65534, 65534, ())
_TRIAL_TIMEOUT_S: Final = 5.0
#: The namespaces of a sandbox beside the user namespace; making them needs rights inside that one.
INNER_NAMESPACES: Final = (
    syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
)
#: A descriptor that nobody has open, and an answer that close(2) never gives by itself.
_ODD_FD: Final = 0xBE27
_ODD_ERRNO: Final = errno.ENOANO


def user_namespaces(sandbox_user: User | None) -> Ability:
    """Make a user namespace and the other namespaces of a sandbox in it, as everybody whom a sandbox may become."""
    return combine({who: _user_namespaces_as(user) for who, user in _users(sandbox_user).items()})


def bubblewrap(sandbox_user: User | None) -> Ability:
    """Set up a sandbox with every option, then with fewer, as everybody whom a sandbox may become."""
    try:
        path = find_bubblewrap()
    except AbilityError as error:
        return Ability(name="bubblewrap", level=DOES_NOT, why=error.message, mend=error.fix)
    return combine({who: _bubblewrap_as(path, user) for who, user in _users(sandbox_user).items()})


def seccomp() -> Ability:
    """Install a filter that answers one odd call in its own way, and make that call."""
    try:
        attempt(_under_filter, timeout_s=_TRIAL_TIMEOUT_S)
    except NoAnswerError as error:
        why = f"installing a filter with prctl(PR_SET_SECCOMP) {error}"
        mend = (
            "The kernel needs CONFIG_SECCOMP_FILTER=y. In a container, run it with a seccomp profile that allows "
            "prctl and seccomp, such as Docker's default: leave out your own `--security-opt seccomp=...`."
        )
        return Ability(name="seccomp", level=DOES_NOT, why=why, mend=mend)
    return Ability(
        name="seccomp", level=WORKS, why="a filter was installed, and it refused the one call it had to refuse"
    )


def sandbox_user(user: User | None) -> Ability:
    """Say who a sandbox becomes, and try to become it.

    Args:
        user: The account of `sandbox.user` in the settings, or None where none is set.
    """
    name = "sandbox user"
    if os.geteuid() != 0:
        return Ability(name=name, level=WORKS, why=f"a sandbox stays who you are outside, {_name_of(os.geteuid())}")
    chosen = user or NOBODY
    try:
        attempt(_becoming(chosen, lambda: ""), timeout_s=_TRIAL_TIMEOUT_S)
    except NoAnswerError as error:
        why = f"root cannot become another user here, so a sandbox stays root outside: becoming uid {chosen[0]} {error}"
        mend = "Run berth where more than one user id is mapped, and with CAP_SETUID and CAP_SETGID."
        return Ability(name=name, level=DOES_NOT, why=why, mend=mend)
    if user is None:
        mend = (
            "Make an account with `useradd --system --shell /usr/sbin/nologin berth-sandbox`, and write "
            '`sandbox.user = "berth-sandbox"` at the top of /etc/berth/config.toml.'
        )
        why = (
            "a sandbox becomes the owner of its workspace; where that is root, its command stays root outside, "
            "because no sandbox.user is set in the settings"
        )
        return Ability(name=name, level=LESS, why=why, mend=mend)
    why = f"a sandbox becomes the owner of its workspace and, where that is root, {_name_of(user[0])} (sandbox.user)"
    return Ability(name=name, level=WORKS, why=why)


def _users(sandbox_user: User | None) -> dict[str, User | None]:
    """Return whom a sandbox may become here, by words that name each."""
    found: dict[str, User | None] = {_name_of(os.geteuid()): None}
    if os.geteuid() == 0:
        user = sandbox_user or NOBODY
        try:
            attempt(_becoming(user, lambda: ""), timeout_s=_TRIAL_TIMEOUT_S)
        except NoAnswerError:
            return found  # `sandbox_user` reports it
        found[_name_of(user[0])] = user
    return found


def _name_of(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _becoming(user: User | None, action: Callable[[], str]) -> Callable[[], str]:
    """Return an action that becomes `user` for good before it acts."""

    def become() -> str:
        if user is not None:
            uid, gid, groups = user
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            syscalls.set_parent_death_signal(signal.SIGKILL)  # a change of user clears it
        return action()

    return become


def _user_namespaces_as(user: User | None) -> Ability:
    name = "user namespaces"
    try:
        refusal = attempt(_becoming(user, _make_namespaces), timeout_s=_TRIAL_TIMEOUT_S)
    except NoAnswerError as error:
        refusal = f"making one {error}"
    if refusal:
        return Ability(name=name, level=DOES_NOT, why=refusal, mend=user_namespace_fix(refusal))
    return Ability(name=name, level=WORKS, why="one was made, and mount, pid, net, ipc and uts namespaces in it")


def _make_namespaces() -> str:
    """Return what the kernel refused, empty where it made them.

    A security module may let anybody make a user namespace and take the rights in it away (AppArmor does), so the
    second step is what counts.
    """
    try:
        syscalls.unshare(syscalls.CLONE_NEWUSER)
    except OSError as error:
        return f"unshare(CLONE_NEWUSER) was refused: {error.strerror}"
    try:
        syscalls.unshare(INNER_NAMESPACES)
    except OSError as error:
        return f"a user namespace was made, and the namespaces of a sandbox were refused in it: {error.strerror}"
    return ""


def _bubblewrap_as(path: str, user: User | None) -> Ability:
    try:
        abilities = probe(user)
    except AbilityError as error:
        return Ability(name="bubblewrap", level=DOES_NOT, why=error.message, mend=error.fix)
    except OSError as error:
        why = f"{path} could not be started: {error.strerror}"
        return Ability(name="bubblewrap", level=DOES_NOT, why=why, mend=f"Let everybody run it: `chmod a+rx {path}`.")
    if not abilities.downgrades:
        return Ability(name="bubblewrap", level=WORKS, why=f"{path} set a sandbox up with every option of berth's")
    why = f"{path} set a sandbox up with fewer options: {'; '.join(abilities.downgrades)}"
    return Ability(name="bubblewrap", level=LESS, why=why, mend=MASKED_PROC_FIX)


def _under_filter() -> str:
    # struct seccomp_data (linux/seccomp.h) has the first argument at offset 16, 64 bits wide; the number of a call
    # differs between architectures, its arguments do not.
    low_half = 16 if sys.byteorder == "little" else 20
    syscalls.set_no_new_privileges()
    syscalls.set_seccomp_filter(
        [
            (0x20, 0, 0, low_half),  # BPF_LD | BPF_W | BPF_ABS
            (0x15, 0, 1, _ODD_FD),  # BPF_JMP | BPF_JEQ | BPF_K
            (0x06, 0, 0, 0x0005_0000 | _ODD_ERRNO),  # SECCOMP_RET_ERRNO
            (0x06, 0, 0, 0x7FFF_0000),  # SECCOMP_RET_ALLOW
        ]
    )
    try:
        os.close(_ODD_FD)
    except OSError as error:
        if error.errno == _ODD_ERRNO:
            return ""
    raise OSError(errno.EPROTO, "the filter was accepted and does nothing")
