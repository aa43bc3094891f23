"""What a run is made of: the model's shape and the decoding rule. Frozen, validated, no JAX.

A family's file in `models/` reads Hugging Face's `config.json` into a `ModelConfig`; all else only reads it.
"""

import dataclasses
import math

from oled_jax.errors import CheckpointError, UsageError

DTYPES = ("float32", "bfloat16", "float16")
MIN_TEMPERATURE = 1e-4  # logits divided by less overflow float32
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched (REFERENCE section 4). Field names are Hugging Face's.

    None means that the key is missing. `short_factor` and `long_factor` hold rotary_dim / 2 numbers.
    Hashable, so that a module can hold it as a static attribute.
    """

    rope_type: str
    factor: float | None = None
    attention_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def problems(self, rotary_dim: int) -> list[str]:
        """Every reason why no rotary table of `rotary_dim` dimensions can be built, one sentence each."""
        if self.rope_type not in ROPE_TYPES:
            return [f"rope_scaling has the type {self.rope_type!r}, it must be one of {', '.join(ROPE_TYPES)}"]
        found = []
        needed = {
            "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "longrope": ("short_factor", "long_factor"),
        }.get(self.rope_type, ())  # fmt: skip
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            found.append(f"rope_scaling of type {self.rope_type} lacks {', '.join(missing)}")
        if self.factor is not None and not 0 < self.factor < math.inf:
            found.append(f"rope_scaling factor is {self.factor}, it must be a positive number")
        if self.rope_type == "llama3" and not missing and self.low_freq_factor == self.high_freq_factor:
            found.append("rope_scaling low_freq_factor and high_freq_factor are equal, the blend needs two values")
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if self.rope_type == "longrope" and values is not None and len(values) != rotary_dim // 2:
                found.append(f"rope_scaling {name} has {len(values)} numbers, it must have {rotary_dim // 2}")
        if self.rope_type == "dynamic" and rotary_dim < 4:
            found.append("rope_scaling of type dynamic needs at least 4 rotary dimensions")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a mixture-of-experts transformer. Field names are Hugging Face's.

    `family` names the entry of `models/registry.py` that builds it; `model_type` is what `config.json` said.
    `bidirectional`: attention goes both ways over the whole text, so there is no KV cache. `shifted_logits`:
    position i predicts token i + 1, not its own.
    `problems` says what is checked; a CheckpointError lists everything that is wrong.
    """

    family: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    num_shared_experts: int | None
    first_k_dense_replace: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    rope_scaling: RopeScaling | None
    use_qk_norm: bool
    use_qkv_bias: bool
    use_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    original_max_position_embeddings: int | None = None
    norm_topk_prob: bool = True
    bidirectional: bool = False
    shifted_logits: bool = False
    dtype: str = "float32"
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise CheckpointError("model configuration", problems)

    def problems(self) -> list[str]:
        """Every reason why no model can be built from these numbers, one sentence each."""
        found = []
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "max_position_embeddings",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.num_key_value_heads >= 1 and self.num_attention_heads % self.num_key_value_heads:
            found.append(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.first_k_dense_replace < 0:
            found.append(f"first_k_dense_replace is {self.first_k_dense_replace}, it must be at least 0")
        if self.first_k_dense_replace > 0 and self.intermediate_size < 1:
            found.append("intermediate_size is missing, but the first layers are dense")
        if self.num_moe_layers > 0:
            found += self._expert_problems()
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            found.append(
                f"partial_rotary_factor {self.partial_rotary_factor} rotates {self.rotary_dim} of "
                f"{self.head_dim} dimensions, it must be an even number from 2 to head_dim"
            )
        elif self.rope_scaling is not None:
            found += self.rope_scaling.problems(self.rotary_dim)
        if not 0 <= self.rms_norm_eps < math.inf:
            found.append(f"rms_norm_eps is {self.rms_norm_eps}, it must be at least 0")
        if not 1 < self.rope_theta < math.inf:
            found.append(f"rope_theta is {self.rope_theta}, it must be above 1")
        if self.dtype not in DTYPES:
            found.append(f"dtype is {self.dtype!r}, it must be one of {', '.join(DTYPES)}")
        return found

    def _expert_problems(self) -> list[str]:
        E, K, G = self.num_experts, self.num_experts_per_tok, self.n_group
        if E < 1 or self.moe_intermediate_size < 1:
            return [f"num_experts {E} and moe_intermediate_size {self.moe_intermediate_size} must be at least 1"]
        if G < 1 or E % G:
            return [f"n_group {G} does not divide num_experts {E}"]
        found = []
        if self.num_shared_experts is not None and self.num_shared_experts < 0:
            found.append(f"num_shared_experts is {self.num_shared_experts}, it must be at least 0")
        if not math.isfinite(self.routed_scaling_factor):
            found.append(f"routed_scaling_factor is {self.routed_scaling_factor}, it must be finite")
        if G > 1 and E // G < 2:
            found.append(f"n_group {G} leaves {E // G} expert in a group, the group score needs two")
        if not 1 <= self.topk_group <= G:
            found.append(f"topk_group {self.topk_group} is not between 1 and n_group {G}")
        elif not 1 <= K <= self.topk_group * (E // G):
            found.append(f"num_experts_per_tok {K} is not between 1 and the {self.topk_group * (E // G)} that pass")
        return found

    @property
    def num_moe_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.first_k_dense_replace)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def page_parameters(self) -> int:
        """Weights of one routed expert: gate and up [2F, D] and down [D, F]."""
        return 3 * self.moe_intermediate_size * self.hidden_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """How text is decoded. Defaults are those of LLaDA2.0's `generate` (REFERENCE sections 6 and 7).

    `editing` chooses the 2.1 rule: then `editing_threshold` (None: nothing is edited), `max_post_steps` and
    `num_to_transfer` apply, `steps` and `minimal_topk` do not. `rule` names another one (`decode/registry.py`).
    `whole_text`: the text is denoised as one, without `block_length`, and `pad_id` stands behind the answer (None:
    eos). `fold_commits`: no pass of its own stores a finished block's keys and values, the next block's first pass does
    (`folding.py`). An `eos_id` of -1: nothing ends the text. Temperature 0 is greedy. `top_k` 0 and `top_p` 1 are off,
    like None.
    """

    mask_id: int
    eos_id: int
    gen_length: int = 2048
    block_length: int = 32
    steps: int = 32
    threshold: float = 0.95
    minimal_topk: int = 1
    editing: bool = False
    editing_threshold: float | None = 0.9
    max_post_steps: int = 16
    num_to_transfer: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    eos_early_stop: bool = False
    rule: str | None = None
    whole_text: bool = False
    entropy_bound: float = 1.0
    pad_id: int | None = None
    fold_commits: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("mask_id", 0), ("eos_id", -1), ("gen_length", 0), ("block_length", 1), ("steps", 1),
            ("minimal_topk", 1), ("max_post_steps", 0), ("num_to_transfer", 1), ("temperature", 0.0),
            ("entropy_bound", 0.0),
        ):  # fmt: skip
            value = getattr(self, name)
            _require(value >= least, f"{name} is {value}, it must be at least {least}")
        for name in ("threshold", "editing_threshold", "temperature", "entropy_bound"):
            value = getattr(self, name)
            _require(value is None or math.isfinite(value), f"{name} is {value}, it must be a finite number")
        _require(
            self.temperature == 0 or self.temperature >= MIN_TEMPERATURE,
            f"temperature is {self.temperature}, it must be 0 (greedy) or at least {MIN_TEMPERATURE}",
        )
        _require(self.top_k is None or self.top_k >= 0, f"top_k is {self.top_k}, it must be at least 0 (0: off)")
        _require(self.top_p is None or self.top_p > 0, f"top_p is {self.top_p}, it must be above 0 (1: off)")
        _require(self.mask_id != self.eos_id, f"mask_id and eos_id are both {self.mask_id}")
        _require(self.pad_id is None or 0 <= self.pad_id != self.mask_id, f"pad_id is {self.pad_id}, no pad token")
        agrees = self.rule is None or (self.rule == "edit") == self.editing
        _require(agrees, f"rule is {self.rule!r}, but editing is {self.editing}")
        _require(0 <= self.seed < 2**32, f"seed is {self.seed}, it must be from 0 to 2**32 - 1")

    @property
    def rule_name(self) -> str:
        """Entry of `decode.registry.RULES`."""
        return self.rule or ("edit" if self.editing else "entropy" if self.whole_text else "threshold")

    @property
    def end_id(self) -> int:
        """What stands behind the answer of a whole text."""
        choices = (self.eos_id if self.pad_id is None else self.pad_id, 0, 1)
        return next(token for token in choices if token >= 0 and token != self.mask_id)
