"""What moving and computing one page costs. Measured by `oled_jax.profile`; read by policies and by the simulator."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Times for one page (one routed expert), in microseconds.

    h2d_us: one transfer from host to device memory (T_H2D). The CPU computes an expert with n tokens in
    cpu_fixed_us + cpu_token_us * n, cold weights, all worker threads together.
    """

    h2d_us: float
    cpu_fixed_us: float
    cpu_token_us: float

    def cpu_us(self, tokens: float) -> float:
        return self.cpu_fixed_us + self.cpu_token_us * tokens


# One H200 behind PCIe 5 x16 with 16 host cores, LLaDA2.0-mini pages (docs/design.md, "What was measured"). Used until a
# machine's own profile is measured; no output depends on it, only which path a miss takes.
UNMEASURED = CostProfile(h2d_us=120.0, cpu_fixed_us=190.0, cpu_token_us=8.0)
