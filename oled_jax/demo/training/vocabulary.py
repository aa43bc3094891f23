"""The tokenizer of the small model: byte-level BPE with single digits, trained on its own data."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from oled_jax.demo.families import training_items
from oled_jax.demo.items import Item

EOS, MASK, USER, ASSISTANT, SYSTEM = "<|eos|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = (EOS, MASK, USER, ASSISTANT, SYSTEM)
EOS_ID, MASK_ID = 0, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles are system, user and assistant, not ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(vocab_size: int, num_items: int, seed: int) -> Tokenizer:
    """A tokenizer over `num_items` training items. Deterministic.

    Args:
      vocab_size: special tokens and the 256 bytes included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    items = itertools.islice(training_items(random.Random(seed)), num_items)
    tokenizer.train_from_iterator((text for item in items for text in (item.prompt, item.answer)), trainer)
    return tokenizer


def encode_item(tokenizer: Tokenizer, item: Item) -> tuple[list[int], list[int]]:
    """Ids of the prompt in the chat template, ready for the answer, and ids of the answer without eos."""
    prompt = f"{USER}{item.prompt}{ASSISTANT}"
    return tokenizer.encode(prompt).ids, tokenizer.encode(item.answer).ids


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """`tokenizer.json` and a `tokenizer_config.json` that transformers reads, chat template included."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    text = json.dumps(described, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
