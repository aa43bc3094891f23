"""What a page costs on the machine that is simulated, and where each figure comes from. No JAX."""

import dataclasses
import json
from pathlib import Path

from oled_jax.cost.profile import UNMEASURED, CostProfile, FfnTime, HardwareProfile, profile_from_json
from oled_jax.errors import UsageError
from oled_jax.traces.trace import TraceHeader

# `cost.profile.UNMEASURED` is one H200 with pages of LLaDA2.0-mini; its expert FFN is in docs/design.md as well.
BUILT_IN_PAGE_BYTES = 3 * 2048 * 512 * 2
BUILT_IN_FFN = FfnTime(pages=64, tokens=16, us=110.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Times of one page on a machine, in microseconds.

    Attributes:
      together: while transfers and the CPU both run; policies go by these.
      alone: while only one of them does.
      ffn: the expert FFN on the device; empty: it counts 0.
      origins: a line for each figure, on what it is and where it comes from.
      carrier: that moved the pages when they were measured; None: they were not.
    """

    together: CostProfile
    alone: CostProfile
    ffn: tuple[FfnTime, ...]
    origins: tuple[str, ...]
    carrier: str | None = None


def read_profile(path: Path) -> HardwareProfile:
    """A hardware profile file (docs/profile.md). Raises UsageError if it cannot be read or is none."""
    try:
        return profile_from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"--profile {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # no JSON, no UTF-8, or no profile
        raise UsageError(f"--profile {path} is no hardware profile: {error}") from error


def is_about(profile: HardwareProfile, header: TraceHeader) -> bool:
    """Whether a profile is about pages like the trace's."""
    key = profile.key
    wanted = (header.hidden_size, header.moe_intermediate_size, header.dtype)
    return (key.hidden, key.width, key.dtype) == wanted


def read_hardware(path: Path, header: TraceHeader) -> Hardware:
    """The figures of a hardware profile file.

    Raises:
      UsageError: it cannot be read, is no profile, or is about pages of another size than the trace's.
    """
    profile = read_profile(path)
    if not is_about(profile, header):
        key = profile.key
        measured = (key.hidden, key.width, key.dtype)
        wanted = (header.hidden_size, header.moe_intermediate_size, header.dtype)
        raise UsageError(
            f"--profile {path} is about pages of {_page(*measured)}, the trace's are {_page(*wanted)}: measure those "
            "(python -m oled_jax.profile), or give bandwidths (--h2d-gbs, --cpu-gbs)"
        )
    return of_profile(profile, str(path))


def _page(hidden: int, width: int, dtype: str) -> str:
    return f"D {hidden}, F {width}, {dtype}"


def of_profile(profile: HardwareProfile, name: str) -> Hardware:
    """As measured. A quick profile has no times of the CPU alone and no FFN."""
    both = profile.costs
    h2d_us, line = profile.alone.h2d_us, profile.alone.cpu
    alone = CostProfile(
        h2d_us=h2d_us,
        cpu_fixed_us=both.cpu_fixed_us if line is None else line.fixed_us,
        cpu_token_us=both.cpu_token_us if line is None else line.token_us,
    )
    ffn = "; ".join(f"{time.us:.4g} us for {time.pages} pages and {time.tokens} tokens" for time in profile.ffn)
    return Hardware(
        together=both,
        alone=alone,
        ffn=profile.ffn,
        carrier=profile.key.carrier,
        origins=(
            f"times from {name}: {profile.key.device}, {profile.key.cpu}, measured {profile.measured_at} with the "
            f"{profile.key.carrier} carrier",
            f"transfer of a page: {alone.h2d_us:.4g} us, {both.h2d_us:.4g} us while the CPU computes (measured)",
            f"expert of n tokens on the CPU: {_line(alone)} us ({'measured' if line else 'as with transfers'}), "
            f"{_line(both)} us while pages move (measured)",
            f"expert FFN on the device: {ffn} (measured)"
            if ffn
            else "expert FFN on the device: 0 (not in the profile)",
        ),
    )


def of_bandwidths(
    page_bytes: int,
    *,
    h2d_gbs: float | None = None,
    cpu_gbs: float | None = None,
    cpu_token_us: float | None = None,
    device_gbs: float | None = None,
) -> Hardware:
    """From how fast pages move and are read, 10^9 bytes per second.

    What is None comes from the built-in figures, scaled by the size of a page.

    Args:
      h2d_gbs: transfers. cpu_gbs: an expert on the CPU, all its threads together, whatever its tokens.
      cpu_token_us: what each of its tokens takes besides. device_gbs: the expert FFN on the device.
    """
    scale = page_bytes / BUILT_IN_PAGE_BYTES
    given = (h2d_gbs, cpu_gbs, cpu_token_us, device_gbs)
    source = (
        f"built in is one H200 with pages of {BUILT_IN_PAGE_BYTES / 1e6:.3g} MB, "
        f"scaled to the trace's {page_bytes / 1e6:.3g} MB: no measurement of this machine"
    )

    def us(gbs: float | None, otherwise: float) -> float:
        return otherwise * scale if gbs is None else page_bytes / gbs / 1e3

    def origin(value: float | None, unit: str) -> str:
        return "built in" if value is None else f"given: {value:g} {unit}"

    token_us = UNMEASURED.cpu_token_us * scale if cpu_token_us is None else cpu_token_us
    costs = CostProfile(
        h2d_us=us(h2d_gbs, UNMEASURED.h2d_us), cpu_fixed_us=us(cpu_gbs, UNMEASURED.cpu_fixed_us), cpu_token_us=token_us
    )
    ffn_us = us(device_gbs, BUILT_IN_FFN.us / BUILT_IN_FFN.pages)
    return Hardware(
        together=costs,
        alone=costs,
        ffn=(FfnTime(pages=1, tokens=BUILT_IN_FFN.tokens, us=ffn_us),),
        origins=(
            *([source] if None in given else []),
            f"transfer of a page: {costs.h2d_us:.4g} us ({origin(h2d_gbs, 'GB/s')})",
            f"expert of n tokens on the CPU: {_line(costs)} us (a: {origin(cpu_gbs, 'GB/s')}; "
            f"b: {origin(cpu_token_us, 'us')})",
            f"expert FFN on the device: {ffn_us:.4g} us a page ({origin(device_gbs, 'GB/s')})",
        ),
    )


def _line(costs: CostProfile) -> str:
    return f"{costs.cpu_fixed_us:.4g} + {costs.cpu_token_us:.3g} n"
