"""What a synthetic trace shall be: shape, length, and the figures that it shall show. Presets of published models."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from oled_jax.config import DTYPES
from oled_jax.errors import UsageError
from oled_jax.models.published import PUBLISHED

DEFAULT_BLOCK = 32  # of the published LLaDA2 checkpoints
# Distinct experts per iteration by block length: for mini as published, for flash as the OLED-MoE paper has them.
PUBLISHED_DISTINCT: Mapping[str, Mapping[int, float]] = {
    "llada2-mini": {16: 49.0, 32: 70.0},
    "llada2-flash": {16: 60.0, 32: 90.0},
}
# Between the fewest and the most distinct experts that a block can have, the published figures lie at 0.40 to 0.54.
DISTINCT_SHARE = 0.42


@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets:
    """Figures that the trace shall show, each defined as in `traces.locality`.

    Attributes:
      distinct_experts: activated by an iteration, mean over layers.
      adjacent_overlap: |A_i ∩ A_{i+1}| / |A_{i+1}| of adjacent iterations over a block, mean over layers.
      boundary_overlap: the same from a block's last iteration to the next block's first.
      confidence_correlation: of an unwritten token's confidence with the share of its routes that it keeps.
      layer_heterogeneity: standard deviation over mean of the layers' distinct experts.
      kept_decoded, kept_masked, kept_written: share of its routes that a token keeps, by its state.
    """

    distinct_experts: float
    adjacent_overlap: float = 0.87
    boundary_overlap: float = 0.70
    confidence_correlation: float = 0.3
    layer_heterogeneity: float = 0.15
    kept_decoded: float = 0.80
    kept_masked: float = 0.79
    kept_written: float = 0.26

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "distinct_experts":
                continue  # its range depends on the shape: `SyntheticSpec` checks it
            low = -1.0 if field.name == "confidence_correlation" else 0.0
            if not low <= value <= 1.0:
                raise UsageError(f"target {field.name} is {value:g}, it must be from {low:g} to 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticSpec:
    """A synthetic trace: requests one after the other, each of `blocks` blocks.

    Attributes:
      name: what the trace is called.
      num_layers, num_experts, top_k: MoE layers, experts per layer, experts per token.
      hidden_size, moe_intermediate_size, dtype: of a page.
      block_length: positions denoised together.
      prompt_tokens: of each request; its whole blocks are prefilled, the rest begins the first block.
      blocks: of each request that are generated, the one that begins with the rest of the prompt included.
      requests: how many; None: as many as `iterations` needs.
      iterations: denoise passes after which the trace ends; None: with the last request.
      tokens_per_iteration: masks that a denoise pass fills, on average.
      vocab_size: token ids are below it, token v about 1/(v + 1) as frequent as token 0; the mask token is vocab_size.
      routed_scaling_factor: what the gates of a token sum up to.
      seed: of all random numbers.
      targets: what it shall show.

    Raises:
      UsageError: a value is impossible.
    """

    name: str = "synthetic"
    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int = 2048
    moe_intermediate_size: int = 512
    dtype: str = "bfloat16"
    block_length: int = DEFAULT_BLOCK
    prompt_tokens: int = 64
    blocks: int = 8
    requests: int | None = None
    iterations: int | None = 500
    tokens_per_iteration: float = 3.0
    vocab_size: int = 8192
    routed_scaling_factor: float = 2.5
    seed: int = 0
    targets: Targets

    def __post_init__(self) -> None:
        least = dict.fromkeys(("num_layers", "num_experts", "top_k", "hidden_size", "moe_intermediate_size"), 1)
        least |= {"block_length": 1, "prompt_tokens": 0, "blocks": 1, "requests": 1, "iterations": 1, "vocab_size": 2}
        for name, low in (least | {"seed": 0}).items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"{name} is {value}, it must be at least {low}")
        if self.top_k > self.num_experts:
            raise UsageError(f"top_k is {self.top_k}, but there are {self.num_experts} experts")
        if (self.requests is None) == (self.iterations is None):
            raise UsageError("a synthetic trace has a number of requests or of iterations: give one of the two")
        if not 1 <= self.tokens_per_iteration <= self.block_length:
            raise UsageError(
                f"tokens_per_iteration is {self.tokens_per_iteration:g}, it must be from 1 to the block length of "
                f"{self.block_length}"
            )
        if not self.routed_scaling_factor > 0:
            raise UsageError(f"routed_scaling_factor is {self.routed_scaling_factor:g}, it must be above 0")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype is {self.dtype!r}, it must be one of {', '.join(DTYPES)}")
        self._check_targets()

    def _check_targets(self) -> None:
        most = min(self.num_experts, self.block_length * self.top_k)
        wanted = self.targets.distinct_experts
        if not self.top_k <= wanted <= most:
            raise UsageError(
                f"target distinct_experts is {wanted:g}: {self.block_length} tokens with {self.top_k} of "
                f"{self.num_experts} experts each activate from {self.top_k} to {most}"
            )
        if self.num_layers == 1 and self.targets.layer_heterogeneity > 0:
            raise UsageError("target layer_heterogeneity must be 0 where there is one layer")

    @property
    def mask_id(self) -> int:
        return self.vocab_size


def usual_distinct(num_experts: int, top_k: int, block_length: int) -> float:
    """Distinct experts per iteration for shapes of which nothing is published.

    At DISTINCT_SHARE of the way from K, where all tokens agree, to what independent uniform routes would activate.
    """
    uniform = num_experts * (1 - (1 - top_k / num_experts) ** block_length)
    return top_k + DISTINCT_SHARE * (uniform - top_k)


def make_spec(preset: str | None = None, targets: Mapping[str, float] | None = None, **fields: Any) -> SyntheticSpec:
    """A synthetic trace's specification, with defaults for what is not given.

    Args:
      preset: name of a published model, whose shape it takes; None: `fields` holds num_layers, num_experts and top_k.
      targets: fields of `Targets`. Without `distinct_experts`, it is the published number where preset, experts and
        block length have one, else `usual_distinct`.
      fields: other fields of `SyntheticSpec`, in place of the preset's.

    Raises:
      UsageError: there is no such preset, or a value is impossible or missing.
    """
    values = (_preset_fields(preset) if preset is not None else {}) | fields
    missing = [name for name in ("num_layers", "num_experts", "top_k") if name not in values]
    if missing:
        raise UsageError(f"a synthetic trace without a preset needs {' and '.join(missing)}")
    block = values.setdefault("block_length", DEFAULT_BLOCK)
    wanted = dict(targets or {})
    if values["num_layers"] == 1:
        wanted.setdefault("layer_heterogeneity", 0.0)
    if "distinct_experts" not in wanted:
        unchanged = preset is not None and not {"num_experts", "top_k"} & set(fields)
        published = PUBLISHED_DISTINCT[preset].get(block) if preset is not None and unchanged else None
        wanted["distinct_experts"] = published or usual_distinct(values["num_experts"], values["top_k"], block)
    return SyntheticSpec(**values, targets=Targets(**wanted))


def _preset_fields(name: str) -> dict[str, Any]:
    if name not in PUBLISHED:
        raise UsageError(f"there is no preset {name!r}, there are {', '.join(PUBLISHED)}")
    config = PUBLISHED[name]
    same = ("num_experts", "hidden_size", "moe_intermediate_size", "dtype", "routed_scaling_factor", "vocab_size")
    return {
        "name": name,
        "num_layers": config["num_hidden_layers"] - config["first_k_dense_replace"],
        "top_k": config["num_experts_per_tok"],
        **{field: config[field] for field in same},
    }
