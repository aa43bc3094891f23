"""What displays write, on a terminal and elsewhere, from events that are made up."""

import io

import numpy as np
import pytest

from oled_jax.decode.events import BlockEvent, FinishEvent, PassEvent, Result
from oled_jax.offload.statistics import CacheStatistics
from oled_jax.passes import PassKind
from oled_jax.terminal.denoising import Denoising
from oled_jax.terminal.pieces import INSIDE_CHARACTER, MASKED, block_pieces, token_texts
from oled_jax.terminal.status import Status
from oled_jax.terminal.stream import BlockStream
from oled_jax.text import TextCodec

MASK = 511
RESULT = Result(
    output_ids=(1,), canvas=np.zeros(1, np.int32), finish="length", passes={}, ttft_prefill_s=0.0,
    ttft_block_s=None, decode_s=0.0, tpot_s=None,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def codec(tiny_model):
    return TextCodec.open(tiny_model)


@pytest.fixture
def statistics():
    counted = CacheStatistics(num_layers=1, num_experts=8, page_bytes=1)
    counted.add(PassKind.DENOISE, 0, activated=100, hits=1, capacity=8)  # before the run
    return counted


def block_event(codec, text):
    return BlockEvent(row=0, block=1, tokens=tuple(codec.encode_prompt(text)))


def pass_event(tokens, confidence, *, masks=(), edits=(), kind=PassKind.DENOISE):
    tokens, confidence = np.array(tokens, np.int32), np.array(confidence, np.float32)
    return PassEvent(
        row=0, kind=kind, block=1, step=2, post_steps=0, tokens_before=tokens, tokens_after=tokens,
        predicted=tokens, confidence=confidence, mask_transfer=masks, edit_transfer=edits, num_to_transfer=1,
    )  # fmt: skip


def test_the_status_line_counts_this_run_alone(codec, statistics):
    times = iter([10.0, 12.0])
    status = Status(statistics, clock=lambda: next(times))
    assert status.line() == "block 0 · 0 passes · 0 tokens"
    status.add(pass_event([MASK], [0.5]))
    statistics.add(PassKind.EDIT, 0, activated=4, hits=3, capacity=8)
    status.add(block_event(codec, "abcdefgh"))
    assert status.line() == "block 1 · 1 passes · 8 tokens · 4.0 tokens/s · hit rate 75.0%"


def test_blocks_are_written_as_they_come_and_characters_whole(codec):
    out = io.StringIO()
    display = BlockStream(out, codec, None)
    ids = codec.encode_prompt("a😀é")
    for part, written in ((ids[:3], "a"), (ids[3:6], "a😀"), (ids[6:], "a😀é")):
        display.show(BlockEvent(row=0, block=1, tokens=tuple(part)))
        assert out.getvalue() == written
    display.show(FinishEvent(row=0, result=RESULT))
    display.close()
    display.close()
    assert out.getvalue() == "a😀é\n"


def test_ids_are_separated_by_commas():
    out = io.StringIO()
    display = BlockStream(out, None, None)
    for tokens in ((1, 2), (), (3,)):
        display.show(BlockEvent(row=0, block=1, tokens=tokens))
    display.close()
    assert out.getvalue() == "1,2,3\n"


def test_on_a_terminal_the_status_stands_below_and_goes(codec, statistics, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    display = BlockStream(out, codec, Status(statistics))
    display.show(block_event(codec, "ab"))
    first = out.getvalue()
    assert first.startswith("\x1b[Jab\x1bD\x1b[A\x1b7\r\n")
    status = first.split("\x1b[2m")[1].split("\x1b[0m")[0]
    assert status.startswith("block 0")
    assert len(status) == 19  # cut, so that it never takes a second row
    display.show(block_event(codec, "x" * 18))
    assert "x" * 18 + "\r\n" in out.getvalue(), "a full row ends, or its last character would be overwritten"
    display.close()
    assert out.getvalue().endswith("\x1b8\x1b[J\n")


def test_pieces_say_what_is_known_of_each_position(codec):
    a, b, c = codec.encode_prompt("abc")
    event = pass_event([a, b, c, MASK], [1.0, 0.95, 0.6, 0.1], masks=(1,), edits=(2,))
    pieces = block_pieces(event, codec, MASK, prompt_length=5)
    assert [piece.text for piece in pieces] == ["a", "b", "c", MASKED]
    assert [piece.kind for piece in pieces] == ["prompt", "high", "middle", "masked"]
    assert [piece.new for piece in pieces] == [False, True, True, False]
    assert [piece.edited for piece in pieces] == [False, False, True, False]


def test_a_character_of_several_tokens_is_shown_by_the_last(codec):
    ids = codec.encode_prompt("é")
    assert token_texts(ids, codec, MASK) == [INSIDE_CHARACTER, "é"]
    assert token_texts([ids[0], MASK, ids[1]], codec, MASK) == [INSIDE_CHARACTER, MASKED, INSIDE_CHARACTER]
    assert token_texts([510], codec, MASK) == [""]  # the end token is no text
    assert token_texts([3, MASK], None, MASK) == ["3 ", f"{MASK} "]


def show_all(display, codec):
    a, b = codec.encode_prompt("ab")
    display.show(pass_event([a, MASK], [0.2, 0.2], masks=(0,)))
    display.show(pass_event([a, b], [0.2, 0.95], masks=(1,), edits=(0,)))
    display.show(block_event(codec, "ab"))
    display.show(pass_event([a, b], [1.0, 1.0], kind=PassKind.COMMIT))
    display.close()


def test_without_a_terminal_a_pass_is_a_plain_line(codec, statistics):
    out = io.StringIO()
    show_all(Denoising(codec, MASK, 0, Status(statistics), out), codec)
    assert out.getvalue().splitlines() == [f"block 1, denoise 3: a{MASKED}", "block 1, denoise 3: [a]b"]


def test_on_a_terminal_masks_confidence_and_edits_have_colours(codec, statistics, monkeypatch):
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "40"), ("LINES", "10")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    show_all(Denoising(codec, MASK, 0, Status(statistics), out), codec)
    written = out.getvalue()
    assert f"\x1b[1;31ma\x1b[0m\x1b[90m{MASKED}\x1b[0m" in written  # unsure and new; masked
    assert "\x1b[4;35ma\x1b[0m\x1b[1;32mb\x1b[0m" in written  # edited; sure and new
    assert "hit rate" not in written  # nothing was counted in this run
    assert "edited" in written
    assert written.endswith("\x1b[2K"), "the picture is taken away"
