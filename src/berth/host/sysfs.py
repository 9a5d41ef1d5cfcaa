"""Small files of /sys and /proc under any root: what is not there is None, what is malformed names its file.

Old kernels end some lists and masks with two newlines (the caches of POWER) or with a NUL, which is no part of them.
"""

import errno
import os
import re
from pathlib import Path

from berth.errors import MalformedError
from berth.host.cpuset import CpuSet

CPU_DIRECTORY = "/sys/devices/system/cpu"
NODE_DIRECTORY = "/sys/devices/system/node"

# A file that is not there: older kernel, CPU just taken offline (ENODEV: its sysfs node went while it was open).
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV)


def read_optional(root: str, path: str) -> str | None:
    """Return the text of one small file, or None when it is not there.

    NULs at the end are left out: some kernels counted the one that ends the string.

    Args:
        root: Root of the machine.
        path: Absolute path on that machine.

    Raises:
        OSError: The file is there and cannot be read.
    """
    try:
        return os.fsdecode(Path(root, path.lstrip("/")).read_bytes().rstrip(b"\0"))
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise


def read_list(root: str, path: str) -> CpuSet | None:
    """Return the CPU list in a file, or None when it is not there.

    Raises:
        MalformedError: It is no CPU list.
        OSError: The file is there and cannot be read.
    """
    text = read_optional(root, path)
    return None if text is None else CpuSet.parse_list(text.rstrip("\n"), source=path)


def read_mask(root: str, path: str) -> CpuSet | None:
    """Return the CPU mask in a file, or None when it is not there.

    Raises:
        MalformedError: It is no CPU mask.
        OSError: The file is there and cannot be read.
    """
    text = read_optional(root, path)
    return None if text is None else CpuSet.parse_mask(text.rstrip("\n"), source=path)


def read_list_or_mask(root: str, list_path: str, mask_path: str) -> CpuSet | None:
    """Return the set in the list file, on kernels without it that in the mask file; None when neither is there.

    Raises:
        MalformedError: It is not in the kernel's form.
        OSError: The file is there and cannot be read.
    """
    found = read_list(root, list_path)
    return read_mask(root, mask_path) if found is None else found


def read_number(root: str, path: str) -> int | None:
    """Return the decimal number in a file, or None when it is not there or was recorded empty.

    Raises:
        MalformedError: `bad-sysfs-number`: it is no number.
        OSError: The file is there and cannot be read.
    """
    text = read_optional(root, path)
    if not text:  # A recorder that was not allowed to read a file leaves an empty one.
        return None
    if not re.fullmatch(r"-?[0-9]{1,20}\n?", text):
        raise MalformedError("bad-sysfs-number", f"{path} holds {text[:80]!a} where the kernel writes a number.")
    return int(text)


def numbered(root: str, directory: str, prefix: str) -> CpuSet:
    """Return the N of all entries PREFIXN; node numbers are held to the same limit as CPU numbers.

    Args:
        root: Root of the machine.
        directory: Absolute path on that machine; without it nothing is listed.
        prefix: PREFIX.

    Raises:
        MalformedError: N is above that limit.
        OSError: The directory is there and cannot be read.
    """
    try:
        names = os.listdir(Path(root, directory.lstrip("/")))
    except OSError as error:
        if error.errno in _ABSENT:
            return CpuSet()
        raise
    matches = (re.fullmatch(rf"{prefix}(0|[1-9][0-9]{{0,8}})", name) for name in names)
    return CpuSet.of(int(match[1]) for match in matches if match)
