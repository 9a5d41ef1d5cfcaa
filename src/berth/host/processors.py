"""What a CPU is and how fast: core ids and frequencies from sysfs, the model from /proc/cpuinfo.

Frequencies: the kernel's admin-guide/pm/cpufreq, in kHz. /proc/cpuinfo differs per architecture; where it is not known
what a line says, nothing is taken from it.
"""

import re

from berth.host.cpuset import CpuSet
from berth.host.sysfs import CPU_DIRECTORY, read_number, read_optional
from berth.host.topology import CpuDetails

_KHZ_PER_MHZ = 1000.0
#: Keys that name the model: x86, ia64 and arm of 32 bits; LoongArch; POWER.
_MODEL_KEYS = ("model name", "Model Name", "cpu")


def read_details(root: str, online: CpuSet) -> tuple[CpuDetails, ...]:
    """Return what is known about each online CPU, ascending; a CPU of which nothing is known is left out.

    The current frequency is the one the governor asks for, else what /proc/cpuinfo says (x86).

    Raises:
        MalformedError: A file does not hold what the kernel documents.
        OSError: A file is there and cannot be read.
    """
    shown = _shown_mhz(root)
    every = (_read_one(root, cpu, shown.get(cpu)) for cpu in online)
    return tuple(cpu for cpu in every if (cpu.core_id, cpu.max_mhz, cpu.current_mhz) != (None, None, None))


def read_model(root: str) -> str | None:
    """Return the model of the CPUs, of each kind if there are several; None where the kernel does not say.

    On arm of 64 bits it is what the CPU says of itself, like `implementer 0x48 part 0xd01` (MIDR_EL1).

    Raises:
        OSError: /proc/cpuinfo is there and cannot be read.
    """
    models: dict[str, None] = {}
    for block in _blocks(root):
        named = next((block[key] for key in _MODEL_KEYS if block.get(key)), None)
        if named is None and "CPU implementer" in block and "CPU part" in block:
            named = f"implementer {block['CPU implementer']} part {block['CPU part']}"
        if named is not None:
            models[named] = None
    return ", ".join(models) or None


def _read_one(root: str, cpu: int, shown_mhz: float | None) -> CpuDetails:
    directory = f"{CPU_DIRECTORY}/cpu{cpu}"
    current = _read_mhz(root, f"{directory}/cpufreq/scaling_cur_freq")
    core_id = read_number(root, f"{directory}/topology/core_id")
    return CpuDetails(
        number=cpu,
        core_id=None if core_id == -1 else core_id,
        max_mhz=_read_mhz(root, f"{directory}/cpufreq/cpuinfo_max_freq"),
        current_mhz=shown_mhz if current is None else current,
    )


def _read_mhz(root: str, path: str) -> float | None:
    """Return a frequency; `<unknown>` is what the kernel prints where the driver cannot tell (Linux 3.x to 6.x)."""
    text = read_optional(root, path)
    if text is None or text.strip() == "<unknown>":
        return None
    khz = read_number(root, path)
    return khz / _KHZ_PER_MHZ if khz else None


def _shown_mhz(root: str) -> dict[int, float]:
    found = {}
    for block in _blocks(root):
        processor, mhz = block.get("processor", ""), block.get("cpu MHz", "")
        if re.fullmatch("[0-9]{1,9}", processor) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", mhz):
            found[int(processor)] = float(mhz)
    return found


def _blocks(root: str) -> list[dict[str, str]]:
    """Return the blocks of /proc/cpuinfo, which empty lines separate."""
    text = read_optional(root, "/proc/cpuinfo") or ""
    lines = ([line.split(":", 1) for line in block.split("\n") if ":" in line] for block in text.split("\n\n"))
    return [{key.strip(): " ".join(value.split()) for key, value in block} for block in lines if block]
