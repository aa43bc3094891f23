"""JSON schema of the statistics object. A change here changes what users parse: see docs/statistics.md."""

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    """All keys required, no others allowed."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


COUNT = {"type": "integer", "minimum": 0}
SECONDS = {"type": "number", "minimum": 0}
RATIO = _or_null({"type": "number", "minimum": 0, "maximum": 1})
TEXT = {"type": "string"}
FLAG = {"type": "boolean"}

PLANNING = _object(**dict.fromkeys(("priority", "allocation", "dispatch", "residency", "total", "accounting"), SECONDS))
CACHE = _object(
    policy=TEXT,
    capacity={"type": "number", "minimum": 1},
    capacities={"type": "array", "items": COUNT, "minItems": 1},
    passes=COUNT,
    hits=COUNT,
    misses=COUNT,
    to_gpu=COUNT,
    to_cpu=COUNT,
    prefetched=COUNT,
    prefetch_used=COUNT,
    bytes_h2d=COUNT,
    bytes_per_token=_or_null(SECONDS),
    utilization=RATIO,
    hit_rate=RATIO,
    effective_transfer_ratio=RATIO,
    activation_ratio=RATIO,
    planning_us=_or_null(PLANNING),
)
SHARE = _object(passes=COUNT, hits=COUNT, misses=COUNT, hit_rate=RATIO, bytes_h2d=SECONDS)
REQUEST = _object(
    id=_or_null({"type": ["string", "integer"]}),
    prompt_tokens=COUNT,
    output_ids={"type": "array", "items": COUNT},
    text=_or_null(TEXT),
    finish={"enum": ["eos", "length"]},
    passes=_object(prefill=COUNT, denoise=COUNT, commit=COUNT, edit=COUNT),
    waited_s=SECONDS,
    ttft_prefill_s=SECONDS,
    ttft_block_s=_or_null(SECONDS),
    decode_s=SECONDS,
    tpot_s=_or_null(SECONDS),
    cache=_or_null(SHARE),
)
TOTALS = _object(
    requests=COUNT, prompt_tokens=COUNT, output_tokens=COUNT, seconds=SECONDS, tokens_per_s=_or_null(SECONDS)
)
MACHINE = _object(
    platform=TEXT,
    device=TEXT,
    device_memory_bytes=_or_null(COUNT),
    host_memory_bytes=_or_null(COUNT),
    cpu_cores=COUNT,
    python=TEXT,
    jax=TEXT,
    jaxlib=TEXT,
    flax=TEXT,
    numpy=TEXT,
)
SETTINGS = _object(
    mask_id=COUNT,
    eos_id={"type": "integer", "minimum": -1},
    gen_length=COUNT,
    block_length=_or_null(COUNT),
    steps=_or_null(COUNT),
    threshold=_or_null({"type": "number"}),
    minimal_topk=_or_null(COUNT),
    editing=FLAG,
    editing_threshold=_or_null({"type": "number"}),
    max_post_steps=_or_null(COUNT),
    num_to_transfer=_or_null(COUNT),
    temperature={"type": "number"},
    top_k=_or_null(COUNT),
    top_p=_or_null({"type": "number"}),
    seed=_or_null(COUNT),
    eos_early_stop=FLAG,
    rule=TEXT,
    whole_text=FLAG,
    entropy_bound=_or_null({"type": "number"}),
    pad_id=_or_null(COUNT),
    fold_commits=_or_null(FLAG),
    chat_template=FLAG,
    system=_or_null(TEXT),
    mode=_or_null(TEXT),
    family=TEXT,
    dtype={"enum": ["float32", "bfloat16", "float16"]},
    policy=TEXT,
    policy_options={"type": "object"},
    expert_cache={"type": "number"},
    spare_slots=COUNT,
    cpu_experts=_or_null(TEXT),
    cpu_threads=_or_null(COUNT),
    carrier=_or_null(TEXT),
    batch=COUNT,
    kv_positions=COUNT,
    prefill_chunk=COUNT,
)
SCHEMA = _object(
    version=TEXT,
    model=TEXT,
    machine=MACHINE,
    settings=SETTINGS,
    requests={"type": "array", "items": REQUEST, "minItems": 1},
    totals=TOTALS,
    cache=CACHE,
    cache_prefill=CACHE,
    cache_commit=CACHE,
    memory=_object(
        host_peak_bytes=COUNT,
        device_peak_bytes=_or_null(COUNT),
        store_bytes=_or_null(COUNT),
        pool_bytes=COUNT,
    ),
)
