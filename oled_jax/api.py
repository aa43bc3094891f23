"""The package from Python: `load` a model once, then `generate`, or `stream` what is written as it is written.

Thin: everything here is in `loading`, `engine`, `decoding_options` and `text`, which may be used by themselves. A model
runs one generation at a time and refuses a second with a RuntimeError, from whatever thread it comes.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax

from oled_jax.config import DecodingConfig
from oled_jax.decode.events import BlockEvent, FinishEvent, Result
from oled_jax.decoding_options import FIELDS, decoding_for
from oled_jax.engine import Engine
from oled_jax.errors import UsageError
from oled_jax.loading import CacheOptions, OpenedModel, RunShape, load_engine, open_model, plan_run
from oled_jax.memory import MemoryPlan
from oled_jax.offload.statistics import GROUPS
from oled_jax.report import cache_object
from oled_jax.text import check_messages
from oled_jax.text_stream import TextStream

DEFAULT_POSITIONS = 4096
SETTINGS = (*FIELDS, "mode", "mask_id", "eos_id")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model wrote to one prompt.

    text: None without a tokenizer. finish: "eos", or "length" if gen_length was reached. result: passes, times and
    cache figures.
    """

    text: str | None
    ids: tuple[int, ...]
    finish: str
    result: Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What a finished block adds to an answer. answer: the whole, in the last part only."""

    text: str
    ids: tuple[int, ...]
    answer: Answer | None = None


class Model:
    """A loaded model. Made by `load`; a context manager that closes it.

    Attributes:
      opened: configuration, tokenizer and checkpoint.
      engine: what runs the passes.
      plan: of memory, for `shape`: what was asked of `load`.
      positions: tokens of a prompt and its answer at most.
    """

    def __init__(
        self, opened: OpenedModel, engine: Engine, policy: str, plan: MemoryPlan, shape: RunShape, positions: int
    ) -> None:
        self.opened, self.engine, self.plan, self.shape, self.positions = opened, engine, plan, shape, positions
        self._policy = policy
        self._tokens = 0

    def generate(self, prompt: Prompt | Sequence[Prompt], **settings: Any) -> Any:
        """Answers one prompt, or each of several.

        Args:
          prompt: text (one user turn), a conversation (mappings with role and content), or token ids; or a sequence
            of these, of which `batch` are decoded together.
          settings: see `decoding`; and `system` and `chat_template` as in `encode`.

        Returns:
          an `Answer`; for a sequence of prompts a list of them, in order.

        Raises:
          UsageError: a prompt or setting that this model cannot take, or more than `load` was told to plan for.
          RuntimeError: the model is generating already.
        """
        prompts, several = _as_prompts(prompt)
        framing = {name: settings.pop(name) for name in ("system", "chat_template") if name in settings}
        ids = [self.encode(each, **framing) for each in prompts]
        decoding = self.decoding(**settings)
        self.require_planned(ids, decoding)
        results = self.engine.generate(ids, decoding, batch=self.shape.batch)
        answers = [self._answer(result) for result in results]
        return answers if several else answers[0]

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[Part]:
        """Answers one prompt and yields what each block adds, as soon as it is final; arguments as for `generate`.

        Until the iterator is used up or closed the model refuses other calls.
        """
        framing = {name: settings.pop(name) for name in ("system", "chat_template") if name in settings}
        ids = [self.encode(prompt, **framing)]
        decoding = self.decoding(**settings)
        self.require_planned(ids, decoding)
        return self._parts(ids, decoding)

    def _parts(self, ids: list[list[int]], decoding: DecodingConfig) -> Iterator[Part]:
        text = TextStream(self.opened.codec) if self.opened.codec.available else None
        for event in self.engine.stream(ids, decoding):
            if isinstance(event, BlockEvent) and event.tokens:
                yield Part(text=text.add(event.tokens) if text else "", ids=event.tokens)
            elif isinstance(event, FinishEvent):
                yield Part(text=text.finish() if text else "", ids=(), answer=self._answer(event.result))

    def encode(self, prompt: Prompt, *, system: str | None = None, chat_template: bool = True) -> list[int]:
        """Token ids of one prompt.

        Args:
          system: a system prompt, for text and models with a chat template.
          chat_template: False gives text to the model as it is.
        """
        codec = self.opened.codec
        if isinstance(prompt, str):
            return codec.encode_prompt(prompt, system, use_chat_template=chat_template)
        if system is not None or not chat_template:
            raise UsageError("system and chat_template are for prompts that are text")
        if all(isinstance(each, Mapping) for each in prompt) and len(prompt):
            check_messages(list(prompt), "messages")
            return codec.encode_messages(prompt)  # type: ignore[arg-type]
        return [int(token) for token in prompt]  # type: ignore[arg-type]

    def decoding(self, **settings: Any) -> DecodingConfig:
        """The effective decoding settings: fields of `DecodingConfig`, and mode, on top of the checkpoint's.

        Raises:
          UsageError: there is no such setting, it has an impossible value, or it would have no effect.
        """
        for name in settings:
            if name not in SETTINGS:
                raise UsageError(f"there is no setting {name!r}, there are: {', '.join(SETTINGS)}")
        return decoding_for(self.opened, settings)[0]

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Figures of the expert cache since loading: `cache`, `cache_prefill`, `cache_commit` (docs/statistics.md)."""
        return {name: cache_object(self.engine, self._policy, kinds, self._tokens) for name, kinds in GROUPS.items()}

    def close(self) -> None:
        """Ends transfers and threads. The model cannot be used afterwards."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, result: Result) -> Answer:
        codec = self.opened.codec
        self._tokens += len(result.output_ids)
        text = codec.decode(result.output_ids) if codec.available else None
        return Answer(text=text, ids=result.output_ids, finish=result.finish, result=result)

    def require_planned(self, ids: Sequence[Sequence[int]], decoding: DecodingConfig) -> None:
        """Raises UsageError for runs that are larger than what memory was planned for, and so might not fit."""
        longest = max(len(each) for each in ids)
        needed = RunShape.of([len(each) for each in ids], decoding, self.shape.batch)
        if longest + decoding.gen_length > self.positions or needed.kv_positions > self.shape.kv_positions:
            raise UsageError(
                f"a prompt of {longest} tokens and an answer of up to {decoding.gen_length} are more than the "
                f"{self.positions} positions that memory was planned for: shorten one, or load the model for more"
            )


def load(
    model: str | None = None,
    *,
    expert_cache: int | str | None = None,
    expert_cache_gb: float | None = None,
    policy: str = "oled",
    cpu_experts: str | None = None,
    cpu_threads: int | None = None,
    carrier: str | None = None,
    dtype: str | None = None,
    family: str | None = None,
    batch: int = 1,
    positions: int | None = None,
) -> Model:
    """Opens a model, plans memory and loads the weights. Comes before anything else uses JAX, whose start it prepares.

    Args:
      model: a directory, a hub id, or None for the small model inside the package.
      expert_cache, expert_cache_gb, policy, cpu_experts, cpu_threads, carrier, dtype, family: as the flags of
        `python -m oled_jax.generate`.
      batch: prompts that are decoded together at most.
      positions: tokens of a prompt and its answer at most; None: 4096, or what the model was made for if it is less.

    Raises:
      UsageError: there is no such model, it cannot be used, or it does not fit.
    """
    if batch < 1 or (positions is not None and positions < 1):
        raise UsageError(f"batch is {batch} and positions {positions}: both must be at least 1")
    size = None if expert_cache is None else str(expert_cache)
    cache = CacheOptions.parse(
        policy, size, expert_cache_gb, cpu_experts=cpu_experts, cpu_threads=cpu_threads, carrier=carrier
    )
    opened = open_model(model, dtype, family)
    decoding, _ = decoding_for(opened, {})
    longest = positions or min(DEFAULT_POSITIONS, opened.config.max_position_embeddings)
    shape = RunShape.reserved(longest, decoding, batch)
    plan = plan_run(opened, cache, shape, jax.local_devices()[0])
    engine, _ = load_engine(opened, cache, plan)
    return Model(opened, engine, policy, plan, shape, longest)


def _as_prompts(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a sequence of several."""
    if isinstance(prompt, str):
        return [prompt], False
    parts: list[Any] = list(prompt)
    if not parts:
        raise UsageError("the prompt is empty: give text, messages or token ids, or several of these")
    several = [_is_prompt(part) for part in parts]
    if all(several):
        return parts, True
    if any(several):
        raise UsageError("the prompts are a mixture: give text, messages or token ids, or several of these")
    return [parts], False


def _is_prompt(part: object) -> bool:
    """Text, a conversation or ids; a message or a token id is only a part of one."""
    return isinstance(part, str) or (isinstance(part, Sequence) and not isinstance(part, Mapping))
