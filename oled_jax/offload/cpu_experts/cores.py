"""The physical cores behind logical CPUs."""

from collections.abc import Set
from pathlib import Path

ROOT = Path("/sys/devices/system/cpu")


def one_cpu_per_core(cpus: Set[int], root: Path = ROOT) -> list[int]:
    """The lowest of these CPUs on each core, ascending; where the system does not say, each CPU is a core."""
    lowest: dict[str, int] = {}
    for cpu in sorted(cpus):
        siblings = root / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        lowest.setdefault(siblings.read_text().strip() if siblings.is_file() else str(cpu), cpu)
    return list(lowest.values())


def physical_cores(cpus: Set[int], root: Path = ROOT) -> int:
    """How many cores are behind these CPUs."""
    return len(one_cpu_per_core(cpus, root))
