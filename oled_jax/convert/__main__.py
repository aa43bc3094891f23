"""`python -m oled_jax.convert`: checkpoints into the layout of the expert store, and back. Wiring only."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
from tqdm import tqdm

import oled_jax
from oled_jax.cli import CommandParser, note, run_command
from oled_jax.config import DTYPES
from oled_jax.convert.checkpoint import ConvertedCheckpoint, open_checkpoint
from oled_jax.convert.hf import HfCheckpoint
from oled_jax.convert.hub import resolve_model
from oled_jax.convert.inspect import describe_checkpoint
from oled_jax.convert.pieces import Advance, verify_checkpoint
from oled_jax.convert.to_hf import write_hf
from oled_jax.convert.writer import convert_checkpoint, converted_bytes
from oled_jax.errors import UsageError
from oled_jax.machine import prepare_runtime
from oled_jax.memory import format_bytes, store_bytes

NAME = "oled_jax.convert"
FORMS = """\
  python -m oled_jax.convert HF_DIR OUT_DIR            convert (HF_DIR may be a hub id)
  python -m oled_jax.convert --to-hf CKPT_DIR OUT_DIR  back to safetensors
  python -m oled_jax.convert --verify CKPT_DIR         compare a converted checkpoint with its checksums
  python -m oled_jax.convert --inspect DIR             configuration, sizes, what fits here"""


def build_parser() -> CommandParser:
    """The command's flags."""
    parser = CommandParser(
        prog=f"python -m {NAME}",
        description="Converts Hugging Face checkpoints into the layout of the expert store, and back.",
        epilog=f"forms:\n{FORMS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=oled_jax.__version__)
    parser.add_argument("source", metavar="DIR", help="checkpoint to read: directory, or hub id (org/name)")
    parser.add_argument("target", metavar="OUT_DIR", nargs="?", type=Path, help="directory to make")
    parser.add_argument("--to-hf", action="store_true", help="write a Hugging Face checkpoint")
    parser.add_argument("--inspect", action="store_true", help="describe DIR, write nothing")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="cast all weights (default: each as it is, so that --to-hf is exact)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="re-read what was written from the disk and compare checksums"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT_DIR, once the new checkpoint is complete")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (`cli.run_command`)."""
    return run_command(NAME, _run, argv)


def _run(argv: Sequence[str] | None) -> None:
    options = build_parser().parse(argv)
    _check(options)
    source = resolve_model(options.source)
    if options.inspect:
        _inspect(source)
    elif options.target is None:
        _verify(_open_converted(source))
    elif options.to_hf:
        _to_hf(_open_converted(source), options)
    else:
        _convert(source, options)


def _check(options: argparse.Namespace) -> None:
    """Raises UsageError for flags that make no sense together."""
    writes = not options.inspect and not (options.verify and options.target is None and not options.to_hf)
    if options.inspect and options.to_hf:
        raise UsageError("--inspect and --to-hf are two things to do: give one")
    if writes and options.target is None:
        raise UsageError("OUT_DIR is missing: say where to write")
    if options.inspect and options.target is not None:
        raise UsageError(f"--inspect writes nothing: leave out {options.target}")
    if options.inspect and options.verify:
        raise UsageError("--inspect reads no weights: use --verify without it")
    if options.dtype and (options.to_hf or not writes):
        raise UsageError("--dtype belongs to a conversion into the store's layout only")
    if options.overwrite and not writes:
        raise UsageError("--overwrite needs something to write: give OUT_DIR")


def _inspect(directory: Path) -> None:
    weights = open_checkpoint(directory)
    config = weights.config
    prepare_runtime(store_bytes(config))
    print("\n".join(describe_checkpoint(weights, jax.local_devices()[0])))


def _open_converted(directory: Path) -> ConvertedCheckpoint:
    checkpoint = open_checkpoint(directory)
    if not isinstance(checkpoint, ConvertedCheckpoint):
        raise UsageError(f"{directory} is a Hugging Face checkpoint, a converted one is needed")
    return checkpoint


def _verify(checkpoint: ConvertedCheckpoint) -> None:
    size = sum(entry.nbytes for entry in checkpoint.manifest.entries)
    with _progress("verifying", size) as advance:
        verify_checkpoint(checkpoint.directory, checkpoint.manifest, advance)
    note(f"{checkpoint.directory}: {len(checkpoint.manifest.entries)} tensors as they were written")


def _convert(directory: Path, options: argparse.Namespace) -> None:
    source = open_checkpoint(directory)
    if not isinstance(source, HfCheckpoint):
        raise UsageError(f"{directory} is a converted checkpoint already (--to-hf leads back)")
    jax.config.update("jax_platforms", "cpu")  # Orbax starts a backend; it need not reserve a GPU's memory
    size = converted_bytes(source, options.dtype)
    note(f"converting {directory} to {options.target}, {format_bytes(size)}")
    with _resumable(), _progress("converting", size) as advance:
        convert_checkpoint(source, options.target, dtype=options.dtype, overwrite=options.overwrite, advance=advance)
    if options.verify:
        _verify(ConvertedCheckpoint.open(options.target))


def _to_hf(checkpoint: ConvertedCheckpoint, options: argparse.Namespace) -> None:
    dtype = checkpoint.manifest.dtype
    if dtype is not None:
        note(f"writing {dtype}: the checkpoint was converted with --dtype {dtype}")
    size = sum(entry.nbytes for entry in checkpoint.manifest.entries)
    with _progress("writing", size * (2 if options.verify else 1)) as advance:
        write_hf(checkpoint, options.target, overwrite=options.overwrite, verify=options.verify, advance=advance)


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        note("stopped; the same command goes on where this one was")
        raise


@contextmanager
def _progress(what: str, num_bytes: int) -> Iterator[Advance]:
    """A bar on standard error with rate and time left."""
    with tqdm(total=num_bytes, desc=what, unit="B", unit_scale=True, file=sys.stderr, smoothing=0.1) as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main())
