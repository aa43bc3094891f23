"""A hardware profile as people read it: one table, times in microseconds."""

from collections.abc import Iterator

from oled_jax.cost.profile import CpuLine, CpuTime, HardwareProfile

COLUMNS = ("us", "alone", "both at once", "remarks")
WIDTHS = (44, 10, 14)


def profile_table(profile: HardwareProfile) -> str:
    """Title and table. "Both at once": while transfers and CPU experts run at the same time."""
    return "\n".join([*_title(profile), "", *(_row(*cells) for cells in _rows(profile))])


def _title(profile: HardwareProfile) -> Iterator[str]:
    key = profile.key
    memory = "pinned" if profile.pinned else "pageable"
    yield f"hardware profile: {key.device}, {key.cpu} with {key.cpus} CPUs"
    yield f"page: D {key.hidden}, F {key.width}, {key.dtype}, {key.page_bytes / 1e6:.3g} MB; {memory} host memory"
    yield profile.description


def _rows(profile: HardwareProfile) -> Iterator[tuple[str, str, str, str]]:
    alone, both, page_bytes = profile.alone, profile.together, profile.key.page_bytes
    yield COLUMNS
    rates = " / ".join(f"{page_bytes / figures.h2d_us / 1e3:.1f}" for figures in (alone, both))
    yield "transfer of one page (T_H2D)", _us(alone.h2d_us), _us(both.h2d_us), f"{rates} GB/s"
    yield from _cpu_rows(alone.cpu, both.cpu)
    fastest = min(profile.threads, key=_time, default=None)
    for time in profile.threads:
        remark = f"the fastest: --cpu-threads {time.threads}" if time is fastest and len(profile.threads) > 1 else ""
        name = f"    {_count(time.tokens, 'token')}, {_count(time.threads, 'thread')}"
        yield name, "", _us(time.us), remark
    for ffn in profile.ffn:
        remark = f"{_us(ffn.us / ffn.pages)} a page, {ffn.pages * page_bytes / ffn.us / 1e3:.0f} GB/s"
        yield f"expert FFN on the device, {ffn.pages} pages, {ffn.tokens} tokens", _us(ffn.us), "", remark
    if profile.host_read_gbs is not None:
        us = page_bytes / profile.host_read_gbs / 1e3
        remark = f"{profile.host_read_gbs:.1f} GB/s"
        yield f"one page read from host memory, {_count(profile.key.cpus, 'CPU')}", _us(us), "", remark


def _cpu_rows(alone: CpuLine | None, both: CpuLine | None) -> Iterator[tuple[str, str, str, str]]:
    lines = alone, both
    measured = [{point.tokens: _us(point.us) for point in line.points} if line else {} for line in lines]
    fits = [f"{line.fixed_us:.4g} + {line.token_us:.3g} n" if line else "not measured" for line in lines]
    yield "one expert on the CPU, n tokens", "", "", f"fit: alone {fits[0]}, both at once {fits[1]}"
    for tokens in sorted({*measured[0], *measured[1]}):
        cells = [times.get(tokens, "") for times in measured]
        yield f"    {_count(tokens, 'token')}", cells[0], cells[1], ""


def _row(name: str, alone: str, both: str, remark: str) -> str:
    return f"{name:<{WIDTHS[0]}}{alone:>{WIDTHS[1]}}{both:>{WIDTHS[2]}}  {remark}".rstrip()


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _time(point: CpuTime) -> float:
    return point.us
