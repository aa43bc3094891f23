"""`python -m oled_jax.chat`: turns, commands, Ctrl-C, and what a turn keeps of the one before."""

import io
import signal
import sys

import pytest

from oled_jax import chat, load
from oled_jax.conversation import Conversation
from oled_jax.decode.events import BlockEvent
from oled_jax.errors import UsageError
from oled_jax.machine import CACHE_VARIABLE, MEMORY_FRACTION_VARIABLE
from oled_jax.terminal.stream import BlockStream

SETTINGS = {"gen_length": 20, "block_length": 8, "threshold": 0.3}
FLAGS = ["--gen-length", "20", "--block-length", "8", "--threshold", "0.3", "--expert-cache", "6"]


@pytest.fixture(scope="module")
def model(talking_model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")
        with load(str(talking_model), expert_cache=6, positions=220) as model:
            yield model


@pytest.fixture
def say(monkeypatch, tmp_path, talking_model, capsys):
    """Runs the command with lines on standard input: exit code, standard output, standard error."""
    monkeypatch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "programs"))

    def say(*lines, flags=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        words = ["--model", str(talking_model), "--context-length", "220", *FLAGS, *flags]
        code = chat.main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return say


def finished(conversation, text):
    list(conversation.send(text))
    return conversation.messages[-1]["content"]


@pytest.mark.slow
def test_a_kept_conversation_says_what_a_fresh_one_says(model):
    conversation = Conversation(model, "Be brief.", **SETTINGS)
    for text in ("one two three", "four", "five six"):
        fresh = Conversation(model, **SETTINGS)
        fresh.messages = list(conversation.messages)
        assert finished(conversation, text) == finished(fresh, text)
        assert fresh.kept.reused == 0
    assert conversation.kept.reused > 48
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 3]
    conversation.reset()
    assert [message["role"] for message in conversation.messages] == ["system"]


def test_a_conversation_that_outgrows_its_memory_is_refused_and_stays_as_it_was(model):
    conversation = Conversation(model, **SETTINGS)
    finished(conversation, "a")
    before = list(conversation.messages)
    with pytest.raises(UsageError, match="memory was planned for"):
        list(conversation.send("x" * 300))
    assert conversation.messages == before
    stopped = conversation.send("b")
    for event in stopped:
        if isinstance(event, BlockEvent):
            stopped.close()
            break
    assert len(conversation.messages) == 4
    assert conversation.messages[-1]["content"]


def test_turns_and_commands(say):
    code, out, err = say("", "hello", "/stats", "/help", "/nothing", "/reset", "hello", "x" * 300, "/exit", "never")
    answers = out.split("\n")  # the answers of random weights hold other characters that end a line
    assert code == 0
    assert answers[0] == answers[1] != ""
    assert answers[2:] == [""]
    for words in ("1 whole answers, 20 tokens", "cache: oled, capacity 6 of 32", "no command /nothing", "Ctrl-C stops"):
        assert words in err
    assert "(/reset begins a new conversation)" in err


def test_ctrl_c_stops_an_answer_and_not_the_program(say, monkeypatch):
    show = BlockStream.show

    def interrupt(self, event):
        show(self, event)
        if isinstance(event, BlockEvent) and event.block < 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BlockStream, "show", interrupt)
    handler = signal.getsignal(signal.SIGINT)
    code, out, err = say("hello", "/stats")
    assert code == 0
    assert err.count("(stopped)") == 1
    assert "0 whole answers" in err
    assert out.endswith("\n")
    assert signal.getsignal(signal.SIGINT) is handler


def test_flags(say, tiny_model):
    assert "lower --gen-length" in say(flags=["--gen-length", "220"])[2]
    assert "no chat template" in say(flags=["--model", str(tiny_model)])[2]
    assert "have no modes" in say(flags=["--mode", "speed"])[2]
