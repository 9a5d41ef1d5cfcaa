"""Is there an Ascend driver? Only looked at: in a container the driver gives a chip to whoever opens its node.

So no node is opened and no driver library is loaded here, which would open them. Source: the open Ascend driver
(gitcode.com/hicann/driver), its user library and the installation record /etc/ascend_install.info.
"""

import os
import re
import stat
from typing import Final

from berth.doctor.abilities import DOES_NOT, LESS, WORKS, Ability

_NAME: Final = "NPU driver"
_CHIP: Final = re.compile(r"davinci[0-9]+")
_MANAGER: Final = "davinci_manager"
_INSTALLED: Final = "/etc/ascend_install.info"
_DEFAULT_ROOT: Final = "/usr/local/Ascend"
#: Where products keep the library outside the installation root.
_OTHER_LIBRARIES: Final = ("/usr/local/dcmi/libdcmi.so", "/usr/local/lib/libdcmi.so", "/usr/lib64/libdcmi.so")


def npu_driver() -> Ability:
    """Look for the device nodes and the library of the driver, and for permission to use the nodes."""
    chips = sorted(filter(_CHIP.fullmatch, os.listdir("/dev")), key=lambda name: int(name[len("davinci") :]))
    nodes = [name for name in (_MANAGER, *chips) if _is_device(name)]
    library = _library()
    if not nodes and library is None:
        why = f"no Ascend driver on this host: neither /dev/{_MANAGER} nor /dev/davinciN nor libdcmi.so is there"
        mend = (
            "Nothing is to be mended where there is no NPU. Otherwise install the Ascend HDK driver and firmware of "
            "your product; in a container, pass `--device /dev/davinci0 --device /dev/davinci_manager "
            "--device /dev/devmm_svm --device /dev/hisi_hdc` and mount /usr/local/Ascend/driver."
        )
        return Ability(name=_NAME, level=DOES_NOT, why=why, mend=mend)
    seen = f"device nodes: {', '.join(nodes) or 'none'}; library: {library or 'none'} (looked at, not opened)"
    if _MANAGER not in nodes or len(nodes) < 2:
        mend = (
            "Load the driver (reboot after its installation) and see `dmesg`; in a container, pass "
            "`--device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc`."
        )
        return Ability(name=_NAME, level=DOES_NOT, why=f"no chip can be reached, {seen}", mend=mend)
    closed = [name for name in nodes if not os.access(f"/dev/{name}", os.R_OK | os.W_OK)]
    if closed:
        group = _install_value("UserGroup", "HwHiAiUser")
        mend = f"Join the driver's group, as root: `usermod -aG {group} USER`; then log in again."
        return Ability(name=_NAME, level=LESS, why=f"you may not use {', '.join(closed)}; {seen}", mend=mend)
    if library is None:
        mend = "Install the driver's user part, or in a container mount /usr/local/Ascend/driver read-only."
        return Ability(name=_NAME, level=LESS, why=f"chips are there and cannot be listed, {seen}", mend=mend)
    return Ability(name=_NAME, level=WORKS, why=seen)


def _is_device(name: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(f"/dev/{name}").st_mode)
    except FileNotFoundError:
        return False


def _library() -> str | None:
    root = _install_value("Driver_Install_Path_Param", _DEFAULT_ROOT)
    candidates = (f"{root}/driver/lib64/driver/libdcmi.so", *_OTHER_LIBRARIES)
    return next((path for path in candidates if os.path.exists(path)), None)


def _install_value(key: str, default: str) -> str:
    """Return a value of the installation record, lines of KEY=value."""
    try:
        with open(_INSTALLED, encoding="utf-8", errors="replace") as file:
            found = [line.partition("=")[2].strip() for line in file if line.startswith(f"{key}=")]
    except OSError:
        return default
    return next(filter(None, found), default)
