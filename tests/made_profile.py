"""A hardware profile with made-up figures, for pages of the size that `made_traces` has."""

from oled_jax.cost.profile import CpuLine, CpuTime, Figures, HardwareProfile, ProfileKey

LINE = CpuLine.fit([CpuTime(tokens=n, threads=6, us=90.0 + 6.0 * n) for n in (1, 4)])
BUSY_LINE = CpuLine.fit([CpuTime(tokens=n, threads=6, us=200.0 + 8.0 * n) for n in (1, 4)])
PROFILE = HardwareProfile(
    key=ProfileKey(
        platform="gpu", device="Some GPU", cpu="Some CPU", cpus=16, hidden=64, width=32, dtype="float32",
        carrier="native", backend="auto", threads=6, jax="0.10.2", numba=None,
    ),
    backend="numba", description="", pinned=True, quick=False, measured_at="2025-01-02", seconds=9.5, cpu_setup_s=6.0,
    alone=Figures(h2d_us=120.0, cpu=LINE), together=Figures(h2d_us=170.0, cpu=BUSY_LINE),
)  # fmt: skip
