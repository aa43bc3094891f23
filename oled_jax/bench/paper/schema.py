"""The JSON Schema of a figure's object. `additionalProperties` is false: a field that is not here is a mistake."""

from typing import Any

NUMBER, TEXT, COUNT = {"type": "number"}, {"type": "string"}, {"type": "integer", "minimum": 0}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


VALUE = _object(
    {"mean": NUMBER, "spread": {"type": "number", "minimum": 0}, "runs": {"type": "array", "items": NUMBER}}
)
ROW = _object(
    {
        "panel": TEXT,
        "source": {"enum": ["measured", "estimated", "counted"]},
        "method": {"enum": ["generated", "replayed", "simulated", "routing"]},
        "policy": _or_null(TEXT),
        "capacity": _or_null(COUNT),
        "workload": _or_null(TEXT),
        "batch": _or_null(COUNT),
        "block_length": _or_null(COUNT),
        "setting": _or_null(TEXT),
        "x": _or_null(NUMBER),
        "digest": _or_null(TEXT),
        "values": {"type": "object", "additionalProperties": VALUE, "minProperties": 1},
    }
)
SUBJECT = _object(
    {
        "label": TEXT,
        "description": TEXT,
        "num_moe_layers": COUNT,
        "num_experts": COUNT,
        "top_k": COUNT,
        "page_bytes": COUNT,
        "dtype": TEXT,
        "block_length": COUNT,
    }
)
SETTINGS = (
    "model", "layers", "repeats", "requests", "quick", "carrier", "backend", "threads", "profiles", "decoding", "works",
)  # fmt: skip
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **_object(
        {
            "figures": {"type": "array", "items": COUNT, "minItems": 1},
            "paper_shows": TEXT,
            "here": TEXT,
            "version": TEXT,
            "measured_at": TEXT,
            "seconds": NUMBER,
            "machine": {"type": "object", "required": ["platform", "device", "jax", "cpu_cores"]},
            "load_average": {"type": "array", "items": NUMBER, "minItems": 3, "maxItems": 3},
            "subject": SUBJECT,
            "settings": {"type": "object", "required": [*SETTINGS]},
            "estimated_with": {"type": "object", "additionalProperties": {"type": "array", "items": TEXT}},
            "notes": {"type": "array", "items": TEXT},
            "summary": {"type": "object", "additionalProperties": _or_null(NUMBER)},
            "rows": {"type": "array", "items": ROW, "minItems": 1},
        }
    ),
}
