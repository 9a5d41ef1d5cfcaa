"""Accelerators in sysfs, by their PCI address, and the CPUs that the kernel knows to be near them.

Formats: the kernel's Documentation/ABI/testing/sysfs-bus-pci. `numa_node` is -1 where the firmware does not say. The
kernel then prints every online CPU in `local_cpulist`, which says nothing, so that list counts only beside a node.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from berth.errors import MalformedError
from berth.host.cpuset import CpuSet
from berth.host.sysfs import read_optional

DEVICE_DIRECTORY: Final = "/sys/bus/pci/devices"

# Vendors and base classes: the PCI ID Repository (pci-ids.ucw.cz).
HUAWEI: Final = 0x19E5
NVIDIA: Final = 0x10DE
AMD: Final = 0x1002
HABANA: Final = 0x1DA3
_DISPLAY: Final = 0x03
_PROCESSING_ACCELERATOR: Final = 0x12
_CLASSES: Final = {
    HUAWEI: (_PROCESSING_ACCELERATOR,),
    NVIDIA: (_DISPLAY, _PROCESSING_ACCELERATOR),
    AMD: (_DISPLAY, _PROCESSING_ACCELERATOR),
    HABANA: (_PROCESSING_ACCELERATOR,),
}
#: Device ids of Ascend chips: d100 (310), d500 (310P), d801 (910), d802 (910B), d803 (A3). The compression engines of
#: Kunpeng processors (a250) have the same vendor and class, and its management controllers are displays.
_ASCEND_DEVICES: Final = range(0xD000, 0xE000)

_BUS_ID: Final = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_NUMBER: Final = re.compile(r"(0x[0-9a-fA-F]{1,8}|-?[0-9]{1,9})\n?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """One function on the PCI bus.

    Attributes:
        bus_id: Domain, bus, device and function as the kernel prints them, `0000:c1:00.0`.
        vendor: Vendor id, 16 bits.
        device: Device id of that vendor, 16 bits.
        class_code: Base class, subclass and programming interface, 24 bits.
        numa_node: Its node; None where the kernel does not know.
        local_cpus: Online CPUs of its node; None where the kernel does not know, or where that node has no CPU.
    """

    bus_id: str
    vendor: int
    device: int
    class_code: int
    numa_node: int | None
    local_cpus: CpuSet | None

    @property
    def is_ascend(self) -> bool:
        """Whether it is an Ascend NPU."""
        return self.is_accelerator and self.vendor == HUAWEI

    @property
    def is_accelerator(self) -> bool:
        """Whether it is an NPU, a GPU or the like of a known vendor."""
        known = self.class_code >> 16 in _CLASSES.get(self.vendor, ())
        return known and (self.vendor != HUAWEI or self.device in _ASCEND_DEVICES)


def normalize_bus_id(text: str) -> str:
    """Return a PCI address as the kernel prints it, from any spelling: `C1:00.0`, `00000000:C1:00.0`.

    Raises:
        MalformedError: `bad-bus-id` when the text is no PCI address.
    """
    match = _BUS_ID.fullmatch(text.strip())
    if match is None:
        raise MalformedError(
            "bad-bus-id",
            f"{text[:80]!a} is no PCI address.",
            "Write DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, like 0000:c1:00.0; the domain may be left out.",
        )
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower()


def read_accelerators(root: str = "/") -> tuple[PciDevice, ...]:
    """Return the accelerators of the machine whose file system is at `root`, by ascending address.

    Raises:
        MalformedError: A file does not hold what the kernel documents; the message names the file.
        OSError: A file is there and cannot be read.
    """
    return tuple(device for device in _devices(root) if device.is_accelerator)


def read_device(bus_id: str, root: str = "/") -> PciDevice | None:
    """Return the function at a PCI address in any spelling, whatever it is; None when there is none.

    Raises:
        MalformedError: `bad-bus-id`, or a file does not hold what the kernel documents.
        OSError: A file is there and cannot be read.
    """
    return _read(root, normalize_bus_id(bus_id))


def _devices(root: str) -> Iterator[PciDevice]:
    try:
        names = os.listdir(Path(root, DEVICE_DIRECTORY.lstrip("/")))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in sorted(filter(_BUS_ID.fullmatch, names)):
        if (device := _read(root, name)) is not None:
            yield device


def _read(root: str, name: str) -> PciDevice | None:
    """Return one function; None where its files are gone, as after it was unplugged."""
    directory = f"{DEVICE_DIRECTORY}/{name}"
    vendor = _number(root, f"{directory}/vendor")
    device = _number(root, f"{directory}/device")
    class_code = _number(root, f"{directory}/class")
    if vendor is None or device is None or class_code is None:
        return None
    node = _number(root, f"{directory}/numa_node")
    if node is not None and node < 0:
        node = None
    return PciDevice(
        bus_id=name,
        vendor=vendor,
        device=device,
        class_code=class_code,
        numa_node=node,
        local_cpus=None if node is None else _local_cpus(root, directory),
    )


def _local_cpus(root: str, directory: str) -> CpuSet | None:
    """Return the near CPUs; `local_cpus` is the mask form of the list."""
    path = f"{directory}/local_cpulist"
    text = read_optional(root, path)
    if text is not None:
        return CpuSet.parse_list(text, source=path) or None
    path = f"{directory}/local_cpus"
    text = read_optional(root, path)
    return CpuSet.parse_mask(text, source=path) or None if text else None


def _number(root: str, path: str) -> int | None:
    text = read_optional(root, path)
    if not text:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise MalformedError("bad-sysfs-number", f"{path} holds {text[:80]!a} where the kernel writes a number.")
    return int(match[1], 0)
