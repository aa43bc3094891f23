"""A profile with made-up figures, for tests that need one and measure nothing."""

from oled_jax.cost.profile import CpuLine, CpuTime, FfnTime, Figures, HardwareProfile, ProfileKey

KEY = ProfileKey(
    carrier="portable",
    platform="gpu", device="Some GPU 80GB", cpu="Some CPU", cpus=16, hidden=2048, width=512, dtype="bfloat16",
    backend="auto", threads=6, jax="0.10.2", numba=None,
)  # fmt: skip


def line(fixed_us: float, token_us: float) -> CpuLine:
    return CpuLine.fit([CpuTime(tokens=n, threads=6, us=fixed_us + token_us * n) for n in (1, 2, 4, 8, 16)])


PROFILE = HardwareProfile(
    key=KEY,
    backend="numba",
    description="CPU experts: numba, 6 threads",
    pinned=True,
    quick=False,
    measured_at="2025-01-02T03:04:05+00:00",
    seconds=9.5,
    cpu_setup_s=6.0,
    alone=Figures(h2d_us=120.0, cpu=line(90.0, 6.0)),
    together=Figures(h2d_us=170.0, cpu=line(200.0, 8.0)),
    ffn=(FfnTime(pages=64, tokens=16, us=110.0),),
    host_read_gbs=90.0,
    threads=(CpuTime(tokens=2, threads=2, us=400.0), CpuTime(tokens=2, threads=6, us=216.0)),
)
