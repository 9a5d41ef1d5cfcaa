"""What lets a sandbox be made on a host that refuses it: the exact command or profile, chosen by the host's knobs."""

from typing import Final

#: Where a container hides or write-protects parts of /proc, bubblewrap can neither mount a new one nor write to it.
MASKED_PROC_FIX: Final = (
    "In a container, leave its /proc whole: `docker run --security-opt systempaths=unconfined ...`, "
    "`podman run --security-opt unmask=ALL ...`, `procMount: Unmasked` in Kubernetes."
)


def user_namespace_fix(words: str) -> str:
    """Return what allows user namespaces, and with them bubblewrap, on this host.

    Args:
        words: What the system answered when it refused.
    """
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor forbids unprivileged user namespaces here. Allow bubblewrap with a profile: write "
            "`abi <abi/4.0>, profile bwrap /usr/bin/bwrap flags=(unconfined) { userns, }` to /etc/apparmor.d/bwrap "
            "and run `apparmor_parser -r /etc/apparmor.d/bwrap`, as root."
        )
    if _sysctl("kernel/unprivileged_userns_clone") == "0":
        return "Allow user namespaces, as root: `sysctl -w kernel.unprivileged_userns_clone=1`."
    if _sysctl("user/max_user_namespaces") == "0":
        return "Allow user namespaces, as root: `sysctl -w user.max_user_namespaces=10000`."
    if "nknown option" in words:
        return "bubblewrap is too old for a sandbox; berth needs 0.8 with --bind-fd, or newer."
    return "In a container, run it with a seccomp profile that allows user namespaces; see docs/manual/sandbox.md."


def _sysctl(name: str) -> str | None:
    try:
        with open(f"/proc/sys/{name}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None
