"""What moving and computing one page costs. Measured by `cost.measure`; read by policies and by the simulator.

`CostProfile` is what a policy sees, `HardwareProfile` everything that was measured. Imports no JAX.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = 2  # of the JSON object; a file of another one is measured anew


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Times for one page (one routed expert), in microseconds, while transfers and the CPU both run.

    h2d_us: one transfer from host to device memory (T_H2D). The CPU computes an expert with n tokens in
    cpu_fixed_us + cpu_token_us * n, cold weights, all worker threads together.
    """

    h2d_us: float
    cpu_fixed_us: float
    cpu_token_us: float

    def cpu_us(self, tokens: float) -> float:
        return self.cpu_fixed_us + self.cpu_token_us * tokens


# One H200 behind PCIe 5 x16 with 16 host cores, LLaDA2.0-mini pages (docs/design.md, "What was measured"). Used where
# nothing was measured; no output depends on it, only which path a miss takes.
UNMEASURED = CostProfile(h2d_us=120.0, cpu_fixed_us=190.0, cpu_token_us=8.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """What a profile depends on: a run with the same key may use it.

    Attributes:
      platform, device: JAX's names of the accelerator.
      cpu, cpus: the host's processor, and how many logical CPUs this process may use.
      hidden, width, dtype: D, F and dtype of a page.
      carrier: moves the pages.
      backend: of the CPU experts, as asked for; "auto" stands for the fastest.
      threads: its worker threads.
      jax, numba: versions of what computes; None: not installed.
    """

    platform: str
    device: str
    cpu: str
    cpus: int
    hidden: int
    width: int
    dtype: str
    carrier: str
    backend: str
    threads: int
    jax: str
    numba: str | None

    @property
    def page_bytes(self) -> int:
        return 3 * self.hidden * self.width * (4 if self.dtype == "float32" else 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuTime:
    """Microseconds of one expert with so many tokens on the CPU, all of so many worker threads together."""

    tokens: int
    threads: int
    us: float

    def __post_init__(self) -> None:
        _require_time("us", self.us)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuLine:
    """Microseconds of one expert on the CPU with n tokens, fixed_us + token_us * n, and the times that it fits."""

    fixed_us: float
    token_us: float
    points: tuple[CpuTime, ...]

    def __post_init__(self) -> None:
        for name in ("fixed_us", "token_us"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise ValueError(f"{name} is {value!r}, it must be a number of at least 0")
        if self.fixed_us + self.token_us <= 0:
            raise ValueError("an expert on the CPU takes no time")

    @classmethod
    def fit(cls, points: Sequence[CpuTime]) -> "CpuLine":
        """The line a + b n, a, b >= 0, of least squared relative error.

        Relative, because a miss has few tokens: an absolute fit would follow the longest times, which are rare.

        Args:
          points: of at least two numbers of tokens.
        """
        weights = [1 / (point.us * point.us) for point in points]
        total = sum(weights)
        weighted = list(zip(weights, points, strict=True))
        mean_n = sum(weight * point.tokens for weight, point in weighted) / total
        mean_us = sum(weight * point.us for weight, point in weighted) / total
        spread = sum(weight * (point.tokens - mean_n) ** 2 for weight, point in weighted)
        common = sum(weight * (point.tokens - mean_n) * (point.us - mean_us) for weight, point in weighted)
        token_us = common / spread
        fixed_us = mean_us - token_us * mean_n
        if token_us < 0:  # the best line with b = 0 is the mean
            fixed_us, token_us = mean_us, 0.0
        elif fixed_us < 0:  # the best line through the origin
            through = sum(weight * point.tokens * point.us for weight, point in weighted)
            fixed_us, token_us = 0.0, through / sum(weight * point.tokens**2 for weight, point in weighted)
        return cls(fixed_us=fixed_us, token_us=token_us, points=tuple(points))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Times per page. h2d_us: one transfer. cpu: one expert on the CPU; None: not measured."""

    h2d_us: float
    cpu: CpuLine | None

    def __post_init__(self) -> None:
        _require_time("h2d_us", self.h2d_us)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FfnTime:
    """Microseconds that the device needs for the expert FFN of so many pages and a block of so many tokens."""

    pages: int
    tokens: int
    us: float

    def __post_init__(self) -> None:
        _require_time("us", self.us)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """Everything that was measured for one key. All times are medians.

    Attributes:
      backend: the CPU backend that was measured; `description` says why it was chosen.
      pinned: transfers came from page-locked memory.
      quick: the short measurement that a run makes by itself. It leaves out `ffn`, `host_read_gbs` and
        `threads`, and the CPU alone.
      measured_at: UTC, ISO 8601.
      seconds: how long it took, compilation included; `cpu_setup_s` of them to compile and choose the CPU backend,
        which a run without a profile would spend as well.
      alone, together: while nothing else runs; while transfers and CPU experts both run.
      ffn: the expert FFN on the device.
      host_read_gbs: bandwidth of reading host memory with every CPU, 10^9 bytes per second.
      threads: an expert with two tokens, while transfers run, with other numbers of worker threads.
    """

    key: ProfileKey
    backend: str
    description: str
    pinned: bool
    quick: bool
    measured_at: str
    seconds: float
    cpu_setup_s: float
    alone: Figures
    together: Figures
    ffn: tuple[FfnTime, ...] = ()
    host_read_gbs: float | None = None
    threads: tuple[CpuTime, ...] = ()

    def __post_init__(self) -> None:
        for name in ("seconds", "cpu_setup_s", "host_read_gbs"):
            if getattr(self, name) is not None:
                _require_time(name, getattr(self, name))
        if self.together.cpu is None:
            raise ValueError("the profile lacks the CPU's times while transfers run")

    @property
    def costs(self) -> CostProfile:
        """What policies go by: the times while both sides run, since that is when they are used."""
        line = self.together.cpu
        if line is None:
            raise RuntimeError("unreachable: __post_init__ requires the line")
        return CostProfile(h2d_us=self.together.h2d_us, cpu_fixed_us=line.fixed_us, cpu_token_us=line.token_us)

    def as_json(self) -> dict[str, Any]:
        """The object that docs/profile.md describes."""
        return {"version": FORMAT, **dataclasses.asdict(self)}


def profile_from_json(value: Any) -> HardwareProfile:
    """The inverse of `HardwareProfile.as_json`.

    Raises:
      ValueError: it is no such object, of another version, or holds a time that cannot be one.
    """
    if not isinstance(value, dict) or value.get("version") != FORMAT:
        raise ValueError(f"it is not a profile of version {FORMAT}")
    fields = {name: part for name, part in value.items() if name != "version"}
    try:
        fields["key"] = ProfileKey(**fields["key"])
        for name in ("alone", "together"):
            line = fields[name]["cpu"]
            cpu = None if line is None else CpuLine(**{**line, "points": _times(line["points"])})
            fields[name] = Figures(**{**fields[name], "cpu": cpu})
        fields["ffn"] = tuple(FfnTime(**part) for part in fields["ffn"])
        fields["threads"] = _times(fields["threads"])
        return HardwareProfile(**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"its fields are not those of a profile ({error})") from error


def _times(values: Sequence[Mapping[str, Any]]) -> tuple[CpuTime, ...]:
    return tuple(CpuTime(**value) for value in values)


def _require_time(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}, it must be a positive number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
