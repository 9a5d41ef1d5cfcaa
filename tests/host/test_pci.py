import os
import subprocess

import pytest

from berth.errors import MalformedError
from berth.host.cpuset import CpuSet
from berth.host.pci import AMD, HUAWEI, NVIDIA, PciDevice, normalize_bus_id, read_accelerators, read_device

DEVICES = "/sys/bus/pci/devices"


def device(tree, name: str, *, vendor: str, device: str, kind: str, **files: str) -> None:
    """Write one function of a made-up machine."""
    contents = {"vendor": vendor, "device": device, "class": kind, **files}
    tree.write({f"{DEVICES}/{name}/{file}": text + "\n" for file, text in contents.items()})


def cpus(text: str) -> CpuSet:
    return CpuSet.parse_list(text)


# --- this machine, beside an independent tool ------------------------------------------------------------------------


def test_every_function_of_this_machine() -> None:
    if not os.path.isdir(DEVICES) or not os.listdir(DEVICES):
        pytest.skip("this machine has no PCI bus")
    for name in os.listdir(DEVICES):
        found = read_device(name.upper())
        assert found is not None
        slot = {"SLOT": name, "PCI_ID": "", "PCI_CLASS": ""}
        with open(f"{DEVICES}/{name}/uevent") as file:
            slot.update(line.strip().split("=", 1) for line in file)
        assert found.bus_id == slot["PCI_SLOT_NAME"]
        assert f"{found.vendor:04X}:{found.device:04X}" == slot["PCI_ID"]
        assert f"{found.class_code:X}" == slot["PCI_CLASS"]
        node = int(subprocess.run(["cat", f"{DEVICES}/{name}/numa_node"], capture_output=True).stdout or b"-1")
        assert found.numa_node == (None if node < 0 else node)
        assert (found.local_cpus is None) == (node < 0)


# --- made-up machines ------------------------------------------------------------------------------------------------


def test_accelerator_with_its_node(tree) -> None:
    near = {"numa_node": "6", "local_cpulist": "144-167", "local_cpus": "ff"}
    device(tree, "0000:c1:00.0", vendor="0x19e5", device="0xd802", kind="0x120000", **near)
    (found,) = read_accelerators(tree.root)
    assert found == PciDevice(
        bus_id="0000:c1:00.0",
        vendor=HUAWEI,
        device=0xD802,
        class_code=0x120000,
        numa_node=6,
        local_cpus=cpus("144-167"),
    )
    assert found.is_ascend


@pytest.mark.parametrize("spelling", ["0000:c1:00.0", "0000:C1:00.0", "C1:00.0", " c1:00.0\n", "00000000:C1:00.0"])
def test_bus_id_in_any_spelling(tree, spelling: str) -> None:
    device(tree, "0000:c1:00.0", vendor="0x10de", device="0x2330", kind="0x030200")
    assert normalize_bus_id(spelling) == "0000:c1:00.0"
    found = read_device(spelling, tree.root)
    assert found is not None
    assert (found.vendor, found.bus_id, found.is_ascend) == (NVIDIA, "0000:c1:00.0", False)


def test_other_domains_and_functions_are_kept(tree) -> None:
    device(tree, "10000:6b:02.7", vendor="0x1002", device="0x74a1", kind="0x120000")
    assert normalize_bus_id("00010000:6B:02.7") == "10000:6b:02.7"
    assert [(entry.vendor, entry.bus_id) for entry in read_accelerators(tree.root)] == [(AMD, "10000:6b:02.7")]
    assert read_device("6b:02.7", tree.root) is None


@pytest.mark.parametrize("text", ["", "NA", "c1:00", "0000:c1:00.8", "../../../x", "0000:c1:00.0/..", "0000:c1:00.00"])
def test_what_is_no_bus_id_is_refused(tree, text: str) -> None:
    with pytest.raises(MalformedError) as caught:
        read_device(text, tree.root)
    assert caught.value.name == "bad-bus-id"


@pytest.mark.parametrize(
    ("files", "node", "near"),
    [
        ({"numa_node": "-1", "local_cpulist": "0-191"}, None, None),
        ({"local_cpulist": "0-191"}, None, None),
        ({"numa_node": "3", "local_cpulist": ""}, 3, None),
        ({"numa_node": "3", "local_cpus": "00000000"}, 3, None),
        ({"numa_node": "3"}, 3, None),
        ({"numa_node": "0", "local_cpus": "ff,0000000f"}, 0, "0-3,32-39"),
        ({"numa_node": "0", "local_cpulist": "0-63,128-191"}, 0, "0-63,128-191"),
    ],
)
def test_near_cpus_only_where_the_kernel_knows_the_node(tree, files, node: int | None, near: str | None) -> None:
    device(tree, "0000:01:00.0", vendor="0x19e5", device="0xd500", kind="0x120000", **files)
    (found,) = read_accelerators(tree.root)
    assert found.numa_node == node
    assert found.local_cpus == (None if near is None else cpus(near))


def test_what_is_an_accelerator(tree) -> None:
    kinds = [
        ("0000:01:00.0", "0x19e5", "0xd803", "0x120000", True),
        ("0000:02:00.0", "0x19e5", "0x1711", "0x030000", False),  # the display of a management controller
        ("0000:03:00.0", "0x19e5", "0xa250", "0x120000", False),  # a compression engine of the processor
        ("0000:04:00.0", "0x19e5", "0xa222", "0x020000", False),
        ("0000:05:00.0", "0x10de", "0x2330", "0x030200", True),
        ("0000:05:00.1", "0x10de", "0x22ba", "0x040300", False),  # its sound
        ("0000:06:00.0", "0x1002", "0x74a1", "0x120000", True),
        ("0000:06:00.1", "0x1002", "0x73bf", "0x030000", True),
        ("0000:07:00.0", "0x8086", "0x0d57", "0x060000", False),
        ("0000:08:00.0", "0x1da3", "0x1020", "0x120000", True),
    ]
    for name, vendor, number, kind, _ in reversed(kinds):
        device(tree, name, vendor=vendor, device=number, kind=kind)
    assert [entry.bus_id for entry in read_accelerators(tree.root)] == [name for name, *_, wanted in kinds if wanted]


def test_machine_without_a_bus(tree) -> None:
    assert read_accelerators(tree.root) == ()
    assert read_device("0000:01:00.0", tree.root) is None


def test_function_that_was_unplugged_is_left_out(tree) -> None:
    device(tree, "0000:01:00.0", vendor="0x10de", device="0x2330", kind="0x030200")
    (tree.path / DEVICES.lstrip("/") / "0000:01:00.0" / "class").unlink()
    (tree.path / DEVICES.lstrip("/") / "0000:02:00.0").symlink_to("gone")
    assert read_accelerators(tree.root) == ()


@pytest.mark.parametrize(
    ("file", "text"), [("vendor", "nvidia"), ("numa_node", "zero"), ("class", "0x"), ("local_cpulist", "0-")]
)
def test_file_that_is_not_as_documented_is_named(tree, file: str, text: str) -> None:
    files = {"vendor": "0x10de", "device": "0x2330", "kind": "0x030200", "numa_node": "0", "local_cpulist": "0-3"}
    device(tree, "0000:01:00.0", **files)
    tree.write({f"{DEVICES}/0000:01:00.0/{file}": text})
    with pytest.raises(MalformedError) as caught:
        read_accelerators(tree.root)
    assert f"0000:01:00.0/{file}" in caught.value.message
