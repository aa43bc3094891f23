"""The schema of the profile object (docs/profile.md): strict, so that a new or missing field fails a test."""

TIME = {"type": "number", "exclusiveMinimum": 0}
COUNT = {"type": "integer", "minimum": 1}


def record(**fields: object) -> dict:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def array(item: object) -> dict:
    return {"type": "array", "items": item}


CPU_TIME = record(tokens=COUNT, threads=COUNT, us=TIME)
LINE = record(
    fixed_us={"type": "number", "minimum": 0}, token_us={"type": "number", "minimum": 0}, points=array(CPU_TIME)
)
TEXT = {"type": "string", "minLength": 1}
SCHEMA = record(
    version={"const": 2},
    key=record(
        platform=TEXT, device=TEXT, cpu=TEXT, cpus=COUNT, hidden=COUNT, width=COUNT, dtype=TEXT, carrier=TEXT,
        backend=TEXT, threads=COUNT, jax=TEXT, numba={"type": ["string", "null"]},
    ),
    backend=TEXT,
    description=TEXT,
    pinned={"type": "boolean"},
    quick={"type": "boolean"},
    measured_at=TEXT,
    seconds=TIME,
    cpu_setup_s=TIME,
    alone=record(h2d_us=TIME, cpu={"anyOf": [LINE, {"type": "null"}]}),
    together=record(h2d_us=TIME, cpu=LINE),
    ffn=array(record(pages=COUNT, tokens=COUNT, us=TIME)),
    host_read_gbs={"anyOf": [TIME, {"type": "null"}]},
    threads=array(CPU_TIME),
)  # fmt: skip
