"""How fast a checkpoint loads, against the disk's own sequential rate in the same run.

    python scripts/bench_load.py DIR [--repeats 3] [--json FILE|-]

Both rates are taken with the files out of the kernel's cache: first the files are read from end to end and thrown
away, then the same bytes are loaded as `generate` loads them, into a store in host memory and a trunk on the device.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax

from oled_jax.config import DecodingConfig
from oled_jax.convert.checkpoint import ConvertedCheckpoint, open_checkpoint
from oled_jax.convert.pieces import forget_cached
from oled_jax.convert.weights import StoredWeights
from oled_jax.loading import CacheOptions, OpenedModel, RunShape, load_engine, open_model, plan_run
from oled_jax.machine import host_peak_bytes

READ_BYTES = 8 << 20


def weight_files(weights: StoredWeights) -> list[Path]:
    """Every file that loading reads, in the order of their names."""
    layout = weights.layout
    stored = [tensor for _, tensor in layout.trunk] + [e.stored for layer in layout.experts for e in layer]
    return sorted({tensor.file for tensor in stored if tensor.nbytes})


def sequential_gb_s(files: list[Path]) -> float:
    """The disk: bytes of whole files, read one after the other into one buffer, per second."""
    forget(files)
    buffer, count = bytearray(READ_BYTES), 0
    begin = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while read := stream.readinto(buffer):
                count += read
    return count / (time.perf_counter() - begin) / 1e9


def load_gb_s(model: OpenedModel, files: list[Path]) -> float:
    """Loading: bytes of weights per second, from an open checkpoint to an engine."""
    forget(files)
    cache = CacheOptions.parse("lru", "1", None)
    shape = RunShape.of([8], DecodingConfig(mask_id=1, eos_id=2, gen_length=32))
    plan = plan_run(model, cache, shape, jax.local_devices()[0])
    begin = time.perf_counter()
    engine, _ = load_engine(model, cache, plan)
    jax.block_until_ready((engine.pool, engine.store.layers))
    return model.weights.total_bytes / (time.perf_counter() - begin) / 1e9


def forget(files: list[Path]) -> None:
    for file in files:
        forget_cached(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="DIR", help="Hugging Face or converted checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE|-", help="write the result as one object")
    options = parser.parse_args()
    weights = open_checkpoint(options.model)
    files = weight_files(weights)
    runs = []
    for _ in range(options.repeats):
        disk = sequential_gb_s(files)
        loading = load_gb_s(open_model(str(options.model)), files)
        runs.append({"disk_gb_s": disk, "load_gb_s": loading, "share": loading / disk})
        print(f"disk {disk:.2f} GB/s, loading {loading:.2f} GB/s: {loading / disk:.0%}", file=sys.stderr)
    result = {
        "converted": isinstance(weights, ConvertedCheckpoint),
        "weights_bytes": weights.total_bytes,
        "host_peak_bytes": host_peak_bytes(),
        "share": statistics.median(run["share"] for run in runs),
        "runs": runs,
    }
    text = json.dumps(result, indent=2)
    if options.json and options.json != "-":
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
