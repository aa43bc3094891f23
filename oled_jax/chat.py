"""`python -m oled_jax.chat`: a conversation in the terminal. Wiring, and the commands that begin with a slash."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

import jax

from oled_jax.api import DEFAULT_POSITIONS, SETTINGS, Model
from oled_jax.cli import (
    CommandParser,
    add_cache_flags,
    add_decoding_flags,
    add_model_flags,
    cache_options,
    decoding_options,
    note,
    run_command,
    whole_number,
)
from oled_jax.conversation import LONGEST_CHUNK, Conversation
from oled_jax.decode.events import FinishEvent, Result
from oled_jax.demo import shipped
from oled_jax.errors import UsageError
from oled_jax.loading import RunShape, open_model, plan_run
from oled_jax.machine import use_compilation_cache
from oled_jax.passes import PassKind
from oled_jax.report import cache_line
from oled_jax.startup import announce_plan, load_announced
from oled_jax.terminal.status import Status
from oled_jax.terminal.stream import BlockStream

NAME = "oled_jax.chat"
PROMPT = "> "
HELP = """/reset  forget the conversation
/stats  tokens, passes and the expert cache so far
/help   this list
/exit   leave (or Ctrl-D); Ctrl-C stops an answer"""


def build_parser() -> CommandParser:
    """The command's flags."""
    parser = CommandParser(prog=f"python -m {NAME}", description="A conversation with a model whose experts are paged.")
    add_model_flags(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument(
        "--context-length",
        type=whole_number(1),
        metavar="N",
        help=f"tokens of all turns together at most (default: {DEFAULT_POSITIONS}, or what the model was made for)",
    )
    add_decoding_flags(parser)
    add_cache_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (`cli.run_command`)."""
    return run_command(NAME, _chat, argv)


def _chat(argv: Sequence[str] | None) -> None:
    options = build_parser().parse(argv)
    with _load(options) as model:
        settings = {name: value for name, value in vars(options).items() if name in SETTINGS and value is not None}
        conversation = Conversation(model, options.system, **settings)
        note("compiling the model's programs")
        conversation.prepare()
        note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
        ChatSession(conversation).run()


def _load(options: argparse.Namespace) -> Model:
    """The model, with what the flags ask for said on the way."""
    cache = cache_options(options)
    opened = open_model(options.model, options.dtype, options.family)
    if opened.shipped:
        note(shipped.NOTICE)
    if not opened.codec.has_chat_template:
        raise UsageError(f"model {opened.label} has no chat template: use python -m oled_jax.generate")
    decoding = decoding_options(options, opened)
    use_compilation_cache()
    positions = options.context_length or min(DEFAULT_POSITIONS, opened.config.max_position_embeddings)
    if decoding.gen_length >= positions:
        raise UsageError(
            f"an answer may take {decoding.gen_length} tokens and all turns together {positions}: "
            "lower --gen-length, or raise --context-length"
        )
    shape = RunShape.reserved(positions, decoding, longest_chunk=LONGEST_CHUNK)
    plan = plan_run(opened, cache, shape, jax.local_devices()[0])
    announce_plan(cache, plan)
    engine, _ = load_announced(opened, cache, plan)
    return Model(opened, engine, cache.policy, plan, shape, positions)


class ChatSession:
    """Reads lines, answers them, obeys commands.

    Args:
      conversation: of the session.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._results: list[Result] = []
        self._commands = {"/reset": self._reset, "/stats": self._stats, "/help": self._help}

    def run(self) -> None:
        """Until the user leaves."""
        for line in _lines():
            if line in ("/exit", "/quit"):
                return
            with contextlib.suppress(KeyboardInterrupt):  # between an answer and the next line
                self._obey(line)

    def _obey(self, line: str) -> None:
        if line in self._commands:
            self._commands[line]()
        elif line.startswith("/"):
            note(f"there is no command {line.split()[0]}: /help lists them")
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        codec = self._conversation.model.opened.codec
        display = BlockStream(sys.stdout, codec, Status(self._conversation.model.engine.statistics))
        try:
            with (
                _interruptions() as interrupted,
                contextlib.closing(display),
                contextlib.closing(self._conversation.send(line)) as events,
            ):
                for event in events:
                    display.show(event)
                    if isinstance(event, FinishEvent):
                        self._results.append(event.result)
                    if interrupted.is_set():
                        break
        except UsageError as error:
            note(f"{error} (/reset begins a new conversation)")
            return
        if interrupted.is_set():
            note("(stopped)")

    def _reset(self) -> None:
        self._conversation.reset()
        note("(a new conversation)")

    def _help(self) -> None:
        note(HELP)

    def _stats(self) -> None:
        model = self._conversation.model
        tokens = sum(len(result.output_ids) for result in self._results)
        seconds = sum(result.decode_s for result in self._results)
        passes = sum(count for result in self._results for kind, count in result.passes.items())
        prefills = model.engine.statistics.summary(PassKind.PREFILL).passes
        speed = f", {tokens / seconds:.1f} tokens per second" if seconds > 0 else ""
        note(f"{len(self._results)} whole answers, {tokens} tokens, {passes} passes{speed}")
        if self._conversation.kept is not None:
            note(f"prompts: {prefills} passes; {self._conversation.kept.reused} tokens of the last one were kept")
        note(cache_line(model.statistics()["cache"], model.engine.config.num_experts))


def _lines() -> Iterator[str]:
    """What the user types, without blank lines. Ctrl-C clears the line, Ctrl-D ends."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history of lines)
    while True:
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                note("")
            return
        except KeyboardInterrupt:
            note("\n(/exit or Ctrl-D leaves)")
            continue
        if line:
            yield line


@contextlib.contextmanager
def _interruptions() -> Iterator[threading.Event]:
    """Ctrl-C inside sets the event, instead of breaking into a pass."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
