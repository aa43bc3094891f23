"""lm-evaluation-harness: a model of this package as the harness's model `oled_jax`, for tasks that generate.

`python -m oled_jax.evaluation` is the harness's own command with that model in its list. Needs the extra `lm-eval`.
Tasks that score given text (log-likelihoods) are refused: a block-diffusion model has no left-to-right probability.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from oled_jax.api import Answer, load
from oled_jax.cli import run_command
from oled_jax.errors import UsageError
from oled_jax.machine import use_compilation_cache

NAME = "oled_jax"
DEFAULT_BATCH = 8
# Of the harness's generation arguments: what they are called here.
SETTINGS = {"max_gen_toks": "gen_length", "max_new_tokens": "gen_length", "temperature": "temperature",
            "top_k": "top_k", "top_p": "top_p"}  # fmt: skip
SAMPLING = ("temperature", "top_k", "top_p")

logger = logging.getLogger(__name__)


@register_model(NAME)
class HarnessModel(LM):
    """Answers the harness's requests.

    Args:
      pretrained: a directory or hub id; None: the small model inside the package.
      batch_size: prompts that are decoded together.
      settings: decoding settings of every request (`Model.decoding`); a task's own go before.
      options: of `oled_jax.load`.

    Raises:
      UsageError: see `oled_jax.load`.
    """

    def __init__(self, pretrained: str | None = None, batch_size: int | str = DEFAULT_BATCH, **options: Any) -> None:
        super().__init__()
        # The harness gives one to every model, its own default if the user gave none.
        if "device" in options:
            logger.info("device %s is not used: JAX chooses (JAX_PLATFORMS in the environment)", options.pop("device"))
        if not str(batch_size).isdecimal():
            raise UsageError(f"batch_size is {batch_size!r}, it must be a whole number")
        loading = {name: options.pop(name) for name in LOADING if name in options}
        use_compilation_cache()
        self.model = load(pretrained, batch=int(batch_size), **loading)
        self._settings = options
        self.model.decoding(**options)  # a wrong one is told before the tasks are read
        self._templated = False

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches of requests."""
        return self.model.opened.label.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template, for the harness's record. Only the checkpoint's own can be used."""
        if isinstance(chat_template, str):
            raise UsageError(f"there is no chat template {chat_template!r}: give --apply_chat_template alone")
        return self.model.opened.codec.chat_template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, ready for the answer."""
        self._templated = True
        return self.model.opened.codec.render(chat_history, add_generation_prompt=add_generation_prompt)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Each request's text, cut before the first of its stop strings."""
        answers: dict[int, str] = {}
        groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(tuple(sorted(self._decoding_of(request.args[1]).items())), []).append(number)
        with tqdm(total=len(requests), desc="answers", disable=disable_tqdm) as bar:
            for settings, numbers in groups.items():
                for number, answer in self._answer(requests, numbers, dict(settings), bar.update):
                    context, arguments = requests[number].args
                    answers[number] = cut(answer.text or "", arguments.get("until"))
                    self.cache_hook.add_partial("generate_until", (context, arguments), answers[number])
        return [answers[number] for number in range(len(requests))]

    def _answer(
        self,
        requests: Sequence[Instance],
        numbers: Sequence[int],
        settings: Mapping[str, Any],
        advance: Callable[[int], Any],
    ) -> list[tuple[int, Answer]]:
        """Answers requests of one kind, a few batches at a time so that a bar can move."""
        room = self.model.positions - self.model.decoding(**settings).gen_length
        done: list[tuple[int, Answer]] = []
        step = 4 * self.model.shape.batch
        for start in range(0, len(numbers), step):
            chosen = numbers[start : start + step]
            prompts = [self._ids(requests[number].args[0], room) for number in chosen]
            done += zip(chosen, self.model.generate(prompts, **settings), strict=True)
            advance(len(chosen))
        return done

    def _ids(self, context: str, room: int) -> list[int]:
        """Token ids of a context. One that is too long loses its beginning."""
        ids = self.model.opened.codec.encode_text(context, special_tokens=not self._templated)
        if room < 1:
            raise UsageError("an answer alone takes all positions: lower max_gen_toks, or raise positions")
        if len(ids) > room:
            logger.warning("a context of %d tokens is cut to its last %d (positions)", len(ids), room)
        return ids[-room:]

    def _decoding_of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The decoding settings of a request. Raises UsageError for an argument that is not known here."""
        settings = dict(self._settings)
        for name, value in arguments.items():
            if name in SETTINGS and value is not None:
                settings[SETTINGS[name]] = value
            elif name not in ("until", "do_sample") and name not in SETTINGS:
                raise UsageError(f"the task wants {name}={value!r}, which this model does not know")
        if not arguments.get("do_sample", settings.get("temperature")):
            for name in SAMPLING:
                settings.pop(name, None)
        return settings

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Refused."""
        raise UsageError("this task scores given text: a block-diffusion model can only run tasks that generate")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Refused."""
        raise UsageError("this task scores given text: a block-diffusion model can only run tasks that generate")


LOADING = (
    "expert_cache", "expert_cache_gb", "policy", "cpu_experts", "cpu_threads", "carrier", "dtype", "family",
    "positions",
)  # fmt: skip


def cut(text: str, until: str | Sequence[str] | None) -> str:
    """The text before the first stop string in it."""
    stops = [until] if isinstance(until, str) else until or []
    return text[: min((text.index(stop) for stop in stops if stop and stop in text), default=len(text))]


def main() -> int:
    """Runs the harness's command; returns an exit code (`cli.run_command`)."""
    from lm_eval.__main__ import cli_evaluate

    return run_command("oled_jax.evaluation", lambda _: cli_evaluate(), None)


if __name__ == "__main__":
    sys.exit(main())
