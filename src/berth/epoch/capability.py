"""What a root was found to be able to do: the record of a probe, and what its operator accepts."""

import datetime
import os
from dataclasses import asdict, dataclass, field
from typing import Final

from berth.errors import BerthError
from berth.linux.mounts import Medium, Mount, medium_of

#: Version of the record; the same as of every state file (design, "Ground").
SCHEMA_VERSION: Final = "0.2.0"
#: What the verdict is about: nothing is said about other mounts, hosts or times.
PROBE_SCOPE: Final = "this mount of this host, now"


@dataclass(frozen=True, slots=True)
class Accepted:
    """What an operator takes upon himself.

    Attributes:
        network: That no other client of a network or FUSE file system touches the root.
        volatile: That work-state is gone after a restart or a power cut.
    """

    network: bool = False
    volatile: bool = False


#: What everybody starts with.
NOTHING_ACCEPTED: Final = Accepted()


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that was tried.

    Attributes:
        result: `works`, `does not`, `failed` (could not be tried) or `not tried`.
        why: What was seen, where it does not work.
        errno: Name of the kernel's answer, such as EINVAL, or None.
        seconds: How long the trial took.
    """

    result: str = "not tried"
    why: str = ""
    errno: str | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Capability:
    """What a root was found to be able to do.

    Attributes:
        root: Its path.
        publication_root: Where results are published to, or None.
        mount: The mount it lies on, or None where the mount table does not show it.
        medium: What kind of file system that is.
        accepted: What the operator accepted.
        operations: Every trial by name, in order.
        probed_at: Seconds since 1970-01-01 UTC.
        refusal: Why the root is refused, or None.
    """

    root: str
    mount: Mount | None
    accepted: Accepted
    probed_at: float
    publication_root: str | None = None
    operations: dict[str, Operation] = field(default_factory=dict)
    refusal: BerthError | None = None

    @property
    def medium(self) -> Medium:
        """What kind of file system the root lies on; a mount that is not shown is not known to be local."""
        return Medium.NETWORK if self.mount is None else medium_of(self.mount)

    @property
    def durable(self) -> bool:
        """Whether what was synced is known to outlast a power cut, as far as this host's mount table says."""
        return self.medium is Medium.LOCAL

    def brief(self) -> dict[str, object]:
        """Return what the record of a run says about where its work-state lay."""
        return {
            "file_system": self.mount.file_system if self.mount else None,
            "medium": self.medium.value,
            "durable": self.durable,
            "trust_network": self.accepted.network,
            "allow_volatile": self.accepted.volatile,
        }

    def document(self) -> dict[str, object]:
        """Return the versioned record."""
        mount = self.mount
        return {
            "schema_version": SCHEMA_VERSION,
            "root": self.root,
            "publication_root": self.publication_root,
            "probed_at": datetime.datetime.fromtimestamp(self.probed_at, datetime.UTC).isoformat(),
            "kernel": os.uname().release,
            "device": mount.device if mount else None,
            "mount_point": mount.mount_point if mount else None,
            "file_system": mount.file_system if mount else None,
            "source": mount.source if mount else None,
            "options": list(dict.fromkeys((*mount.options, *mount.super_options))) if mount else None,
            "medium": self.medium.value,
            "operations": {name: asdict(one) for name, one in self.operations.items()},
            "durable": self.durable,
            "trust_network": self.accepted.network,
            "allow_volatile": self.accepted.volatile,
            "probe_scope": PROBE_SCOPE,
            "cluster_lock_verified": False,
            "verdict": "refused" if self.refusal else "qualified",
            "refusal": self.refusal.as_dict() if self.refusal else None,
        }
