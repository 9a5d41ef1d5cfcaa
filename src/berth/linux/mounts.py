"""The mount table: what is mounted where, which mount a descriptor lies in, and what a file system can promise.

The table is /proc/self/mountinfo, proc_pid_mountinfo(5). It shows the mounts below the root of this process only: after
chroot(2), or in a mount that was detached, a descriptor can lie in a mount that has no line.
"""

import enum
import errno
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from berth.errors import MalformedError

_ESCAPE: Final = re.compile(rb"\\([0-3][0-7]{2})")
#: The kernel's mark behind the path of what was removed, which a name may end in as well (proc_pid_fd(5)).
_DELETED: Final = " (deleted)"
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the table, its names decoded as the kernel's own: what is not UTF-8 is kept by surrogateescape.

    Attributes:
        mount_id: Number of the mount while it lasts; given again afterwards.
        parent_id: Number of the mount it lies on; its own for the top of a mount tree.
        device: st_dev of its files as `major:minor` (btrfs shows another one there for each subvolume).
        root: Path within the file system that is shown at the mount point; not `/` for a bind mount.
        mount_point: Path, relative to the root of this process.
        options: Options of this mount (`rw`, `nosuid`).
        file_system: Type, with its subtype: `ext4`, `fuse.sshfs`.
        source: Device or server, `none`, or anything the file system takes.
        super_options: Options of the whole file system.
    """

    mount_id: int
    parent_id: int
    device: str
    root: str
    mount_point: str
    options: tuple[str, ...]
    file_system: str
    source: str
    super_options: tuple[str, ...]


class Medium(enum.StrEnum):
    """What the data of a mount lies on, as far as its type and options tell."""

    #: A disk of this host, as the type says. An overlay says nothing about what lies under it.
    LOCAL = "local"
    #: A server or several hosts, or a type that is not known to be local.
    NETWORK = "network"
    #: A daemon decides what each call does.
    FUSE = "fuse"
    #: Memory, or a mount that turns fsync(2) into nothing: gone with the host's next start.
    VOLATILE = "volatile"


#: What each type is. Names are those of `struct file_system_type` in the Linux source file behind them.
_MEDIA: Final = {
    Medium.LOCAL: {
        "ext2": "fs/ext2/super.c",
        "ext3": "fs/ext4/super.c",
        "ext4": "fs/ext4/super.c",
        "xfs": "fs/xfs/xfs_super.c",
        "btrfs": "fs/btrfs/super.c",
        "zfs": "OpenZFS, module/os/linux/zfs/zpl_super.c",
        "f2fs": "fs/f2fs/super.c",
        "bcachefs": "bcachefs, fs/bcachefs/fs.c",
        "overlay": "fs/overlayfs/super.c",
        "jfs": "fs/jfs/super.c",
        "reiserfs": "fs/reiserfs/super.c, until Linux 6.12",
        "nilfs2": "fs/nilfs2/super.c",
        "ubifs": "fs/ubifs/super.c",
        "vfat": "fs/fat/namei_vfat.c",
        "exfat": "fs/exfat/super.c",
        "ntfs3": "fs/ntfs3/super.c",
        "udf": "fs/udf/super.c",
        "minix": "fs/minix/inode.c",
        "hfsplus": "fs/hfsplus/super.c",
        "erofs": "fs/erofs/super.c, read-only",
        "squashfs": "fs/squashfs/super.c, read-only",
        "iso9660": "fs/isofs/inode.c, read-only",
    },
    # Whatever stands in no table is treated as one of these; they are listed because they are known.
    Medium.NETWORK: {
        "nfs": "fs/nfs/fs_context.c",
        "nfs4": "fs/nfs/fs_context.c",
        "cifs": "fs/smb/client/cifsfs.c",
        "smb3": "fs/smb/client/cifsfs.c",
        "smbfs": "fs/smbfs/inode.c, until Linux 2.6.36",
        "ceph": "fs/ceph/super.c",
        "9p": "fs/9p/vfs_super.c",
        "afs": "fs/afs/super.c",
        "coda": "fs/coda/inode.c",
        "ocfs2": "fs/ocfs2/super.c, a disk that several hosts share",
        "gfs2": "fs/gfs2/ops_fstype.c, a disk that several hosts share",
        "gfs2meta": "fs/gfs2/ops_fstype.c",
        "pvfs2": "fs/orangefs/orangefs-mod.c, the type that OrangeFS registers",
        "orangefs": "the name in OrangeFS' own documentation",
        "virtiofs": "fs/fuse/virtio_fs.c, the host of a virtual machine decides",
        "vboxsf": "fs/vboxsf/super.c, the host of a virtual machine decides",
        "lustre": "Lustre, lustre/llite/super25.c",
        "gpfs": "IBM Storage Scale, mmmount",
        "beegfs": "BeeGFS, client_module/source/filesystem/FhgfsOpsSuper.c",
        "glusterfs": "the type given to mount(8); mounted, it is fuse.glusterfs",
        "panfs": "PanFS DirectFlow, mount.panfs(8)",
        "wekafs": "WEKA, mount -t wekafs",
    },
    Medium.VOLATILE: {
        "tmpfs": "mm/shmem.c",
        "devtmpfs": "drivers/base/devtmpfs.c",
        "rootfs": "init/do_mounts.c, the initramfs",
        "ramfs": "fs/ramfs/inode.c",
        "hugetlbfs": "fs/hugetlbfs/inode.c",
    },
    # A type of these may be followed by a dot and a subtype: fs/fuse/inode.c, fs/proc_namespace.c.
    Medium.FUSE: {"fuse": "fs/fuse/inode.c", "fuseblk": "fs/fuse/inode.c"},
}
_MEDIUM_BY_TYPE: Final = {name: medium for medium, types in _MEDIA.items() for name in types}
#: Documentation/filesystems/overlayfs.rst: syncs of such an overlay report success and do nothing.
_OVERLAY_VOLATILE: Final = frozenset({"volatile", "fsync=volatile"})


def medium_of(mount: Mount) -> Medium:
    """Return what `mount` lies on, from its type and options alone.

    A type that is in no table is NETWORK, the stricter side: it is not known to be local. That goes for proc, sysfs
    and their like too, which hold no files of anybody.
    """
    if mount.file_system == "overlay" and not _OVERLAY_VOLATILE.isdisjoint(mount.super_options):
        return Medium.VOLATILE
    family, dot, _subtype = mount.file_system.partition(".")
    if dot and _MEDIUM_BY_TYPE.get(family) is not Medium.FUSE:
        return Medium.NETWORK
    return _MEDIUM_BY_TYPE.get(family, Medium.NETWORK)


def parse_mounts(text: bytes) -> list[Mount]:
    """Return the mounts in the text of a mountinfo file, in its order: of mounts on one point the last is on top.

    Raises:
        MalformedError: A line is not in the kernel's format.
    """
    return [_parse_line(line) for line in text.split(b"\n") if line]


def read_mounts() -> list[Mount]:
    """Return the mounts that this process sees.

    What is mounted during the whole reading is never missed (Linux 5.8); what comes or goes meanwhile may be.

    Raises:
        OSError: /proc is not mounted, or shows another pid namespace.
        MalformedError: See `parse_mounts`.
    """
    return parse_mounts(_read("/proc/self/mountinfo"))


def mount_id_of(fd: int) -> int:
    """Return the number of the mount that `fd` was opened in, see proc_pid_fdinfo(5).

    Raises:
        OSError: `fd` is not open, or /proc is not mounted.
    """
    path = f"/proc/self/fdinfo/{fd}"
    for line in _read(path).split(b"\n"):
        key, _, value = line.partition(b":")
        if key == b"mnt_id":
            return int(value)
    raise OSError(errno.ENOTSUP, "the kernel does not say which mount this is in", path)


def mount_of(fd: int) -> Mount | None:
    """Return the mount that `fd` was opened in; None where the table does not show it.

    Raises:
        OSError: See `mount_id_of` and `read_mounts`.
        MalformedError: See `parse_mounts`.
    """
    wanted = mount_id_of(fd)
    return next((mount for mount in read_mounts() if mount.mount_id == wanted), None)


def mounts_within(path: str, mounts: Iterable[Mount]) -> list[Mount]:
    """Return those of `mounts` whose mount point is `path` or lies below it.

    Args:
        path: Absolute and without links, as `path_of` returns it: paths are compared, nothing is looked up.
        mounts: Mounts of a table, in any order, which is kept.

    Raises:
        ValueError: `path` is not absolute.
    """
    if not path.startswith("/"):
        raise ValueError(f"not an absolute path: {path!r}")
    top = path.rstrip("/") or "/"
    below = top.rstrip("/") + "/"
    return [mount for mount in mounts if mount.mount_point == top or mount.mount_point.startswith(below)]


def path_of(fd: int) -> str:
    """Return the kernel's own name of the open directory `fd`: absolute, without links, relative to this root.

    It is the name of this moment. In a mount that was detached it begins at the root of that mount; `mount_of` is
    None there.

    Raises:
        FileNotFoundError: The directory was removed; the name in the error is the one it had.
        NotADirectoryError: `fd` is no directory.
        OSError: `fd` is not open, or /proc is not mounted.
    """
    status = os.fstat(fd)
    name = os.readlink(f"/proc/self/fd/{fd}")
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
    if name.endswith(_DELETED) and not _is_at(name, status):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name.removesuffix(_DELETED))
    return name


def _is_at(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), status)
    except OSError:
        return False


def _read(path: str) -> bytes:
    """Return the whole of a file of /proc, which has no size to go by."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, _CHUNK), b""))
    finally:
        os.close(fd)


def _parse_line(line: bytes) -> Mount:
    """Parse one line; any number of optional fields stands before ` - `, and a source may be empty."""
    before, _, after = line.partition(b" - ")
    try:
        mount_id, parent_id, device, root, mount_point, options, *_optional = before.split(b" ")
        file_system, source, super_options = after.split(b" ", 2)
        return Mount(
            mount_id=int(mount_id),
            parent_id=int(parent_id),
            device=_decode(device),
            root=_decode(root),
            mount_point=_decode(mount_point),
            options=_split_options(options),
            file_system=_decode(file_system),
            source=_decode(source),
            super_options=_split_options(super_options),
        )
    except ValueError:
        message = f"/proc/self/mountinfo has a line that is no mount: {line[:200]!r}."
        raise MalformedError("bad-mount-table", message) from None


def _split_options(field: bytes) -> tuple[str, ...]:
    """Split at the commas that separate: one that belongs to a value is escaped as well (linux/seq_file.h)."""
    return tuple(_decode(option) for option in field.split(b","))


def _decode(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), field))
