"""Trains the small model that the package ships, evaluates it, and writes the checkpoint with its model card.

    python scripts/train_demo.py --minutes 9 --state STATE_DIR         # on a GPU; STATE_DIR takes about 55 MB
    python scripts/train_demo.py --export-only --state STATE_DIR --out oled_jax/demo/model

A state holds float32 weights and can be resumed (`--resume`); with `--moments` it holds the optimiser's as well.
`--smoke` runs everything at toy size in seconds.
"""

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STARTED = time.monotonic()

import jax  # noqa: E402 - the clock above counts the imports

from oled_jax.demo.training import sizes  # noqa: E402
from oled_jax.demo.training.card import model_card  # noqa: E402
from oled_jax.demo.training.evaluate import evaluate, locality  # noqa: E402
from oled_jax.demo.training.export import export_checkpoint  # noqa: E402
from oled_jax.demo.training.loop import Budget, Progress, Schedule, train  # noqa: E402
from oled_jax.demo.training.rows import RowShape, stream_rows  # noqa: E402
from oled_jax.demo.training.state_files import SavedState, load_state, read_described, save_state  # noqa: E402
from oled_jax.demo.training.step import StepSettings, TrainState, init_params, new_state  # noqa: E402
from oled_jax.demo.training.vocabulary import train_tokenizer  # noqa: E402
from oled_jax.errors import UsageError  # noqa: E402
from oled_jax.models.registry import config_from_hf  # noqa: E402


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--state", type=Path, required=True, help="directory of the training state")
    add("--out", type=Path, help="directory of the exported checkpoint (default: a temporary one)")
    add("--resume", type=Path, help="state to go on from")
    add("--moments", action="store_true", help="keep the optimiser's moments in --state (three times the size)")
    add("--full-state", type=Path, help="a second state directory, always with moments")
    add("--export-only", action="store_true", help="no training: write the checkpoint of --state")
    add("--scores", type=Path, nargs="+", default=[], metavar="FILE",
        help="with --export-only: JSON of `bench accuracy` for the card, one file for each cache")  # fmt: skip
    add("--locality", type=int, metavar="N", help="with --export-only: measure it over N questions of each family")
    add("--smoke", action="store_true", help="toy size, a few steps, on any machine")
    add("--minutes", type=float, default=9.0, help="wall time of the whole process, evaluation included")
    add("--reserve-seconds", type=float, default=75.0, help="of it, kept for saving and evaluation")
    add("--to-progress", type=float, default=1.0, help="share of the schedule done when this run ends")
    add("--from-progress", type=float, help="share done when it begins (default: the resumed state's, else 0)")
    add("--rows", type=int, default=256, help="rows of a step")
    add("--length", type=int, default=256, help="positions of a row")
    add("--peak-lr", type=float, default=Schedule.peak)
    add("--bias-rate", type=float, default=Schedule.bias_rate)
    add("--fine-bias-rate", type=float, default=Schedule.fine_bias_rate)
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3), help="processes that make data")
    add("--seed", type=int, default=0)
    add("--items", type=int, default=48, help="held-out questions of each family at the end")
    add("--eval-batch", type=int, default=48)
    add("--log-every", type=int, default=100)
    return parser


def main() -> int:
    options = build_parser().parse_args()
    try:
        if options.export_only:
            _export_only(options)
        else:
            _train(_smoke(options) if options.smoke else options)
    except UsageError as error:
        print(f"train_demo: error: {error}", file=sys.stderr)
        return 2
    return 0


def _smoke(options: argparse.Namespace) -> argparse.Namespace:
    toy = {"minutes": 10.0, "rows": 8, "length": 128, "workers": 1, "items": 2, "eval_batch": 4, "log_every": 2}
    return argparse.Namespace(**{**vars(options), **toy})


def _settings(raw_config: dict[str, Any]) -> StepSettings:
    """Passes run in bfloat16 where that is fast."""
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    config = config_from_hf({**raw_config, "dtype": dtype})
    return StepSettings(config=config, block_length=sizes.BLOCK_LENGTH)


def _train(options: argparse.Namespace) -> None:
    raw_config = sizes.SMOKE if options.smoke else sizes.DEMO
    settings = _settings(raw_config)
    saved = _resumed(options, settings) if options.resume else None
    if saved is None:
        tokenizer = train_tokenizer(raw_config["vocab_size"], 2000 if options.smoke else 60000, options.seed)
        state, earlier = new_state(settings, init_params(settings.config, options.seed)), {}
    else:
        tokenizer, state, earlier = saved.tokenizer, saved.state, saved.record
    first_step = int(state.step)
    parameters = sum(array.size for array in state.params.values())
    _report(f"{parameters / 1e6:.2f} M parameters, {jax.devices()[0].device_kind}")
    shape = RowShape(length=options.length, block_length=sizes.BLOCK_LENGTH, chunk=options.rows)
    batches = stream_rows(
        tokenizer, shape, seed=options.seed, first_chunk=first_step, workers=options.workers, ahead=3 * options.workers
    )
    schedule = Schedule(peak=options.peak_lr, bias_rate=options.bias_rate, fine_bias_rate=options.fine_bias_rate)

    def save(state: TrainState, progress: Progress) -> None:
        record = _record(progress, earlier)
        arguments: dict[str, Any] = {"tokenizer": tokenizer, "raw_config": raw_config, "record": record}
        save_state(options.state, state, moments=options.moments, **arguments)
        if options.full_state:
            save_state(options.full_state, state, moments=True, **arguments)

    state, progress = train(
        state, batches, settings, schedule, _budget(options, first_step, earlier),
        seed=options.seed, warm_from=0 if saved is None or saved.has_moments else first_step,
        log_every=options.log_every, report=_report, save=save, save_seconds=150.0,
    )  # fmt: skip
    batches.close()
    save(state, progress)
    print(f"{progress.steps} steps, {progress.tokens / 1e6:.1f} M tokens, state in {options.state}", flush=True)
    _finish(options, SavedState(state=state, has_moments=True, tokenizer=tokenizer, raw_config=raw_config,
                                record=_record(progress, earlier)))  # fmt: skip


def _resumed(options: argparse.Namespace, settings: StepSettings) -> SavedState:
    saved = load_state(options.resume, settings)
    kept = "with" if saved.has_moments else "without"
    print(f"resumed {options.resume} at step {int(saved.state.step)}, {kept} moments", flush=True)
    return saved


def _budget(options: argparse.Namespace, first_step: int, earlier: dict[str, Any]) -> Budget:
    if options.smoke:
        return Budget(steps=first_step + 6)
    begin = earlier.get("schedule", 0.0) if options.from_progress is None else options.from_progress
    return Budget(
        deadline=STARTED + 60.0 * options.minutes - options.reserve_seconds, covers=(begin, options.to_progress)
    )


def _record(progress: Progress, earlier: dict[str, Any]) -> dict[str, Any]:
    """What the whole training has done so far."""
    record = dataclasses.asdict(progress)
    for name in ("steps", "tokens", "answers", "seconds"):
        record[name] += earlier.get(name, 0)
    record["log"] = earlier.get("log", []) + record["log"]
    record["device"] = jax.devices()[0].device_kind
    record["date"] = datetime.date.today().isoformat()
    command = shlex.join(["python", "scripts/train_demo.py", *sys.argv[1:]])
    record["command"] = [*earlier.get("command", []), command]
    return record


def _finish(options: argparse.Namespace, saved: SavedState) -> None:
    """Exports, evaluates what was exported, and adds the scores to the state and to the card."""
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        _export(out, saved)
        deadline = STARTED + 60.0 * options.minutes - 10.0
        scores = evaluate(
            out, sizes.GENERATION, items_each=options.items, batch=options.eval_batch, deadline=deadline, report=_report
        )
        record = {**saved.record, "scores": scores}
        described = read_described(options.state)
        (options.state / "state.json").write_text(json.dumps({**described, "record": record}, indent=1) + "\n")
        _write_card(out, dataclasses.replace(saved, record=record))


def _export_only(options: argparse.Namespace) -> None:
    raw_config = read_described(options.state)["config"]
    saved = load_state(options.state, _settings(raw_config))
    if options.out is None:
        raise UsageError("--export-only needs --out, the directory to write")
    _export(options.out, saved)
    if options.locality:
        measured = locality(options.out, sizes.GENERATION, prompts_each=options.locality)
        print(f"locality: {measured}", flush=True)
        saved = dataclasses.replace(saved, record={**saved.record, "locality": measured})
    _write_card(options.out, saved, [json.loads(file.read_text(encoding="utf-8")) for file in options.scores])


def _export(out: Path, saved: SavedState) -> None:
    export_checkpoint(out, saved.state, saved.tokenizer, saved.raw_config, sizes.GENERATION)


def _write_card(out: Path, saved: SavedState, benches: Sequence[dict[str, Any]] = ()) -> None:
    parameters = sum(array.size for array in saved.state.params.values()) + saved.state.bias.size
    card = model_card(saved.raw_config, parameters, record=saved.record, benches=benches)
    (out / "README.md").write_text(card, encoding="utf-8")
    print(f"checkpoint in {out}: {sum(f.stat().st_size for f in out.iterdir()) / 1e6:.1f} MB", flush=True)


def _report(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
