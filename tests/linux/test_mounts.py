import contextlib
import dataclasses
import errno
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from berth.errors import MalformedError
from berth.linux.mounts import (
    Medium,
    Mount,
    medium_of,
    mount_id_of,
    mount_of,
    mounts_within,
    parse_mounts,
    path_of,
    read_mounts,
)

#: Space, tab, newline, backslash, an escape that is none, a carriage return, `#`, and a byte that is not UTF-8.
AWKWARD = b"a b\tc\nd\\e\\040f\rg#h,i\xff"

# Mounts nothing itself: prints what the functions say about the directory argv[1] after chroot to argv[2].
CHROOTED = """
import os
from berth.linux.mounts import mount_of, mount_id_of
fd = os.open(sys.argv[1], os.O_RDONLY)
inside = os.open(sys.argv[2], os.O_RDONLY)
os.makedirs(sys.argv[2] + "/proc")
os.system('mount --rbind /proc "%s/proc"' % sys.argv[2])
os.chroot(sys.argv[2])
print(mount_id_of(fd) > 0, mount_of(fd), mount_of(inside).mount_point)
"""


@pytest.fixture
def mounted(as_root: None, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts at a new directory of the name `AWKWARD`; all is unmounted afterwards."""
    numbers = itertools.count()

    def mount(*words: str | os.PathLike[str]) -> Path:
        point = tmp_path / f"mount{next(numbers)}" / os.fsdecode(AWKWARD)
        point.mkdir(parents=True)
        done = subprocess.run(["mount", *words, point], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"root may not do this mount here: {done.stderr}")
        undo.callback(unmount, point)
        return point

    def unmount(point: Path) -> None:
        if point.is_mount():
            subprocess.run(["umount", point], check=True)

    with contextlib.ExitStack() as undo:
        yield mount


@pytest.fixture
def descriptor() -> Iterator[Callable[[str | os.PathLike[str]], int]]:
    """Return a function that opens a path; all is closed afterwards."""
    opened: list[int] = []

    def open_path(path: str | os.PathLike[str]) -> int:
        opened.append(os.open(path, os.O_RDONLY))
        return opened[-1]

    yield open_path
    for fd in opened:
        os.close(fd)


def at(path: Path) -> Mount:
    """Return the mount whose point is `path`."""
    (found,) = [mount for mount in read_mounts() if mount.mount_point == str(path)]
    return found


def line(file_system: str, super_options: str = "rw") -> Mount:
    """Return a mount of this type, as the kernel would have printed it."""
    (mount,) = parse_mounts(f"36 35 98:0 / /mnt rw - {file_system} none {super_options}\n".encode())
    return mount


# --- the table -------------------------------------------------------------------------------------------------------


def test_table_of_this_process() -> None:
    mounts = read_mounts()
    assert len({mount.mount_id for mount in mounts}) == len(mounts)
    status = os.stat("/proc")
    (proc,) = [mount for mount in mounts if mount.mount_point == "/proc"][-1:]
    assert (proc.file_system, proc.device) == ("proc", f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}")


def test_findmnt_reads_the_same(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    if shutil.which("findmnt") is None:
        pytest.skip("findmnt (package util-linux) is not installed")
    mounted("-t", "tmpfs", "tmpfs")
    table = tmp_path / "table"
    table.write_bytes(Path("/proc/self/mountinfo").read_bytes())
    words = [
        "findmnt",
        "--json",
        "--list",
        "--tab-file",
        table,
        "-o",
        "ID,PARENT,FSTYPE,MAJ:MIN,VFS-OPTIONS,FS-OPTIONS",
    ]
    found = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)["filesystems"]
    assert [
        {
            "id": mount.mount_id,
            "parent": mount.parent_id,
            "fstype": mount.file_system,
            "maj:min": mount.device,
            "vfs-options": ",".join(mount.options),
            "fs-options": ",".join(mount.super_options),
        }
        for mount in parse_mounts(table.read_bytes())
    ] == found


@pytest.mark.parametrize(
    "optional", ["", "shared:1 ", "shared:1 master:2 ", "unbindable ", "master:1 propagate_from:2 "]
)
def test_line(optional: str) -> None:
    text = f"36 35 98:0 /mnt1 /mnt2 rw,noatime {optional}- ext3 /dev/root rw,errors=continue\n".encode()
    assert parse_mounts(text) == [
        Mount(
            mount_id=36,
            parent_id=35,
            device="98:0",
            root="/mnt1",
            mount_point="/mnt2",
            options=("rw", "noatime"),
            file_system="ext3",
            source="/dev/root",
            super_options=("rw", "errors=continue"),
        )
    ]


def test_escapes() -> None:
    text = rb"1 2 0:1 /r\134040 /p\040\011\012\134\377 rw - fuse.a\040b s\043x rw,lowerdir=/a\054b:/c" + b"\n"
    (mount,) = parse_mounts(text)
    assert mount.root == r"/r\040"
    assert os.fsencode(mount.mount_point) == b"/p \t\n\\\xff"
    assert (mount.file_system, mount.source) == ("fuse.a b", "s#x")
    assert mount.super_options == ("rw", "lowerdir=/a,b:/c")


def test_bytes_that_are_not_escaped() -> None:
    """The kernel escapes few bytes; a carriage return or a form feed ends neither a line nor a field."""
    (mount,) = parse_mounts(b"1 2 0:1 / /a\r\x0c\x85\xfeb rw - ext4 /dev/x rw\n")
    assert os.fsencode(mount.mount_point) == b"/a\r\x0c\x85\xfeb"


def test_empty_source() -> None:
    (mount,) = parse_mounts(b"1 2 0:1 / /a rw - tmpfs  rw,size=4k\n")
    assert (mount.source, mount.super_options) == ("", ("rw", "size=4k"))


def test_order_is_kept_and_an_empty_table_is_empty() -> None:
    text = b"".join(b"%d 1 0:1 / /a rw - ext4 /dev/x rw\n" % number for number in (3, 1, 2))
    assert [mount.mount_id for mount in parse_mounts(text)] == [3, 1, 2]
    assert parse_mounts(b"") == []


@pytest.mark.parametrize(
    "text",
    [
        b"one two",
        b"x 35 98:0 / /mnt rw - ext3 /dev/root rw",
        b"36 35 98:0 / /mnt - ext3 /dev/root rw",
        b"36 35 98:0 / /mnt rw ext3 /dev/root rw",
        b"36 35 98:0 / /mnt rw - ext3 rw",
        b"rootfs / rootfs rw 0 0",
    ],
)
def test_line_that_is_no_mount(text: bytes) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_mounts(b"36 35 98:0 / /mnt rw - ext3 /dev/root rw\n" + text + b"\n")
    assert caught.value.name == "bad-mount-table"
    assert repr(text) in caught.value.message


def test_real_mounts_with_awkward_names(mounted: Callable[..., Path], tmp_path: Path) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=64k,nosuid", "no device")
    (point / "in side").mkdir()
    tmpfs = at(point)
    assert (tmpfs.file_system, tmpfs.root, tmpfs.source) == ("tmpfs", "/", "no device")
    assert "nosuid" in tmpfs.options
    assert "size=64k" in tmpfs.super_options
    assert tmpfs.device == f"{os.major(point.stat().st_dev)}:{os.minor(point.stat().st_dev)}"

    bind = at(mounted("--bind", point / "in side"))
    assert (bind.root, bind.device, bind.file_system) == ("/in side", tmpfs.device, "tmpfs")
    assert bind.mount_id != tmpfs.mount_id
    within = mounts_within(str(tmp_path), read_mounts())
    assert [mount.mount_id for mount in within] == [tmpfs.mount_id, bind.mount_id]


# --- descriptors -----------------------------------------------------------------------------------------------------


def test_mount_of_a_descriptor(mounted: Callable[..., Path], descriptor: Callable[..., int], tmp_path: Path) -> None:
    outside = descriptor(tmp_path)
    point = mounted("-t", "tmpfs", "tmpfs")
    (point / "directory").mkdir()
    (point / "directory" / "file").touch()
    bind = mounted("--bind", point / "directory")
    for path in (point, point / "directory", point / "directory" / "file"):
        assert mount_of(descriptor(path)) == at(point)
    for path in (bind, bind / "file"):
        assert mount_of(descriptor(path)) == at(bind)
        assert mount_id_of(descriptor(path)) == at(bind).mount_id
    seen = mount_of(outside)
    assert seen is not None
    assert mount_id_of(outside) == seen.mount_id
    assert seen.mount_id not in (at(point).mount_id, at(bind).mount_id)


def test_detached_mount_has_no_line(mounted: Callable[..., Path], descriptor: Callable[..., int]) -> None:
    point = mounted("-t", "tmpfs", "tmpfs")
    (point / "directory").mkdir()
    fd = descriptor(point / "directory")
    identifier = mount_id_of(fd)
    subprocess.run(["umount", "--lazy", point], check=True)
    assert mount_id_of(fd) == identifier
    assert mount_of(fd) is None
    assert path_of(fd) == "/directory"


def test_chroot_hides_the_mount(children, mounted: Callable[..., Path], tmp_path: Path) -> None:
    new_root = mounted("-t", "tmpfs", "tmpfs")
    if subprocess.run(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("root may not make a mount namespace here")
    output = children.run(CHROOTED, tmp_path, new_root, prefix=["unshare", "--mount", "--propagation", "private"])
    assert output == "True None /\n"


def test_descriptor_that_is_closed(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    os.close(fd)
    for function in (mount_id_of, mount_of, path_of):
        with pytest.raises(OSError, match=str(fd) if function is not path_of else "Bad file"):
            function(fd)


def test_path_of_a_directory(tmp_path: Path, descriptor: Callable[..., int]) -> None:
    path = tmp_path / os.fsdecode(AWKWARD)
    path.mkdir()
    (tmp_path / "link").symlink_to(path)
    fd = descriptor(tmp_path / "link")
    assert path_of(fd) == str(path)
    path.rename(tmp_path / "moved")
    assert path_of(fd) == str(tmp_path / "moved")


@pytest.mark.parametrize("name", ["directory", "directory (deleted)"])
def test_path_of_a_removed_directory(tmp_path: Path, descriptor: Callable[..., int], name: str) -> None:
    path = tmp_path / name
    path.mkdir()
    fd = descriptor(path)
    assert path_of(fd) == str(path)
    path.rmdir()
    for other in (None, path, tmp_path / f"{name} (deleted)"):
        if other is not None:
            other.mkdir()
        with pytest.raises(FileNotFoundError) as caught:
            path_of(fd)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(path))


def test_path_of_what_is_no_directory(tmp_path: Path, descriptor: Callable[..., int]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        path_of(descriptor(tmp_path / "file"))
    assert caught.value.filename == str(tmp_path / "file")


# --- below a path ----------------------------------------------------------------------------------------------------

POINTS = ("/", "/a", "/a/b", "/a/b/c", "/a/bc", "/a/b c", "/ab")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", POINTS),
        ("/a", ("/a", "/a/b", "/a/b/c", "/a/bc", "/a/b c")),
        ("/a/b", ("/a/b", "/a/b/c")),
        ("/a/b/", ("/a/b", "/a/b/c")),
        ("/a/b/c/d", ()),
        ("/a/b/c/..", ()),
    ],
)
def test_mounts_within(path: str, expected: tuple[str, ...]) -> None:
    mounts = [dataclasses.replace(line("ext4"), mount_point=point) for point in POINTS]
    assert tuple(mount.mount_point for mount in mounts_within(path, mounts)) == expected


@pytest.mark.parametrize("path", ["", "a", "./a"])
def test_mounts_within_a_relative_path(path: str) -> None:
    with pytest.raises(ValueError, match="absolute"):
        mounts_within(path, [line("ext4")])


# --- the medium ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file_system", "super_options", "medium"),
    [
        ("ext4", "rw", Medium.LOCAL),
        ("xfs", "rw,attr2", Medium.LOCAL),
        ("btrfs", "rw,volatile", Medium.LOCAL),  # the word means something on an overlay only
        ("zfs", "rw", Medium.LOCAL),
        ("overlay", "rw,lowerdir=/l,upperdir=/u,workdir=/w", Medium.LOCAL),
        (r"overlay", r"rw,lowerdir=/a\054volatile,upperdir=/u,workdir=/w", Medium.LOCAL),
        ("overlay", "rw,lowerdir=/l,upperdir=/u,workdir=/w,volatile", Medium.VOLATILE),
        ("overlay", "rw,lowerdir=/l,upperdir=/u,workdir=/w,fsync=volatile", Medium.VOLATILE),
        ("overlay", "rw,lowerdir=/l,upperdir=/u,workdir=/w,fsync=strict", Medium.LOCAL),
        ("tmpfs", "rw,size=64k", Medium.VOLATILE),
        ("ramfs", "rw", Medium.VOLATILE),
        ("devtmpfs", "rw", Medium.VOLATILE),
        ("hugetlbfs", "rw,pagesize=2M", Medium.VOLATILE),
        ("fuse", "rw,user_id=0", Medium.FUSE),
        ("fuseblk", "rw", Medium.FUSE),
        ("fuseblk.ntfs", "rw", Medium.FUSE),
        ("fuse.sshfs", "rw", Medium.FUSE),
        ("fuse.glusterfs", "rw", Medium.FUSE),
        ("fuse.ceph", "rw", Medium.FUSE),
        ("fuse.a.b", "rw", Medium.FUSE),
        ("fuse.tmpfs", "rw", Medium.FUSE),
        ("nfs", "rw,vers=3", Medium.NETWORK),
        ("nfs4", "rw", Medium.NETWORK),
        ("cifs", "rw", Medium.NETWORK),
        ("ceph", "rw", Medium.NETWORK),
        ("virtiofs", "rw", Medium.NETWORK),
        ("ocfs2", "rw", Medium.NETWORK),
        # Not known to be local.
        ("fusectl", "rw", Medium.NETWORK),
        ("proc", "rw", Medium.NETWORK),
        ("ext4.sub", "rw", Medium.NETWORK),
        ("tmpfs.sub", "rw", Medium.NETWORK),
        ("ext5", "rw", Medium.NETWORK),
        ("EXT4", "rw", Medium.NETWORK),
        ("", "rw", Medium.NETWORK),
    ],
)
def test_medium(file_system: str, super_options: str, medium: Medium) -> None:
    assert medium_of(line(file_system, super_options)) is medium


def test_medium_of_real_mounts(mounted: Callable[..., Path], tmp_path: Path) -> None:
    tmpfs = mounted("-t", "tmpfs", "tmpfs")
    assert medium_of(at(tmpfs)) is Medium.VOLATILE
    layers = [tmp_path / name for name in ("lower", "upper", "work", "upper2", "work2")]
    for layer in layers:
        layer.mkdir()
    lower, upper, work, upper2, work2 = layers
    plain = mounted("-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}")
    assert medium_of(at(plain)) is Medium.LOCAL
    options = f"lowerdir={lower},upperdir={upper2},workdir={work2},volatile"
    volatile = mounted("-t", "overlay", "overlay", "-o", options)
    assert medium_of(at(volatile)) is Medium.VOLATILE
