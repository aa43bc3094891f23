"""Tokenizer, chat template, message files, and the choice of mask and eos ids."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oled_jax.errors import UsageError
from oled_jax.models.registry import family_of
from oled_jax.text import TextCodec, TokenIds, load_messages, resolve_token_ids

WORDS = (
    "[UNK]",
    "<eos>",
    "<|mask|>",
    "<user>",
    "<system>",
    "<assistant>",
    "hello",
    "world",
    "be",
    "brief",
    "!",
)
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def ids(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


def save_tokenizer(directory: Path, template: str | None = TEMPLATE, **special: str) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>", "<|mask|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **special)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


@pytest.fixture
def codec(tmp_path):
    return TextCodec.open(save_tokenizer(tmp_path / "chat", eos_token="<eos>"))


@pytest.fixture
def plain(tmp_path):
    return TextCodec.open(save_tokenizer(tmp_path / "plain", template=None))


def test_a_family_may_have_a_template_of_its_own(tmp_path):
    template = family_of({"model_type": "rnd1"}).chat_template
    codec = TextCodec.open(save_tokenizer(tmp_path, eos_token="<eos>"), template)

    def text(messages):
        return codec._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    # The words of the published demo.
    question, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    assert text([question]) == "Question: Why?\nAnswer:"
    assert text([question, answer, question]) == "Question: Why?\nAnswer: So.\n\nQuestion: Why?\nAnswer:"
    assert text([{"role": "system", "content": "Be brief."}, question]).startswith("Be brief.\n\nQuestion:")
    assert codec.encode_prompt("hello world", use_chat_template=False) == ids("hello", "world")


def test_prompt_goes_through_the_chat_template(codec):
    assert codec.has_chat_template
    assert codec.encode_prompt("hello world") == ids("<user>", "hello", "world", "<assistant>")


def test_system_prompt_comes_first(codec):
    got = codec.encode_prompt("hello", system="be brief")
    assert got == ids("<system>", "be", "brief", "<user>", "hello", "<assistant>")


def test_messages(codec):
    turns = [("user", "hello"), ("assistant", "world"), ("user", "!")]
    got = codec.encode_messages([{"role": role, "content": content} for role, content in turns])
    assert got == ids("<user>", "hello", "<assistant>", "world", "<user>", "!", "<assistant>")


def test_raw_text_without_template_or_when_switched_off(codec, plain):
    assert codec.encode_prompt("hello world", use_chat_template=False) == ids("hello", "world")
    assert not plain.has_chat_template
    assert plain.encode_prompt("hello world") == ids("hello", "world")
    assert plain.encode_prompt("") == []


def test_system_prompt_is_never_dropped(codec, plain):
    with pytest.raises(UsageError, match=r"--system needs a chat template, and it is switched off"):
        codec.encode_prompt("hello", system="be brief", use_chat_template=False)
    with pytest.raises(UsageError, match=r"--system needs a chat template, and .* has none"):
        plain.encode_prompt("hello", system="be brief")


def test_messages_need_a_template(plain):
    with pytest.raises(UsageError, match=r"--messages needs a chat template"):
        plain.encode_messages([{"role": "user", "content": "hello"}])


def test_template_that_refuses_a_conversation(codec):
    with pytest.raises(UsageError, match=r"chat template of .* refuses these messages: no tools here"):
        codec.encode_messages([{"role": "tool", "content": "hello"}])


def test_decode(codec):
    tokens = ids("hello", "!", "<eos>", "<|mask|>")
    assert codec.decode(tokens) == "hello !"
    assert codec.decode(tokens, skip_special_tokens=False) == "hello ! <eos> <|mask|>"
    assert codec.decode([]) == ""


def test_template_in_a_file_of_its_own(tmp_path):
    save_tokenizer(tmp_path, template=None)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert TextCodec.open(tmp_path).encode_prompt("hello") == ids("<user>", "hello", "<assistant>")


def test_special_ids(codec, tmp_path):
    assert (codec.mask_id, codec.eos_id) == (
        WORDS.index("<|mask|>"),
        WORDS.index("<eos>"),
    )  # found by its name
    declared = TextCodec.open(save_tokenizer(tmp_path / "declared", mask_token="<user>"))
    assert (declared.mask_id, declared.eos_id) == (WORDS.index("<user>"), None)


def test_directory_that_asks_for_its_own_code(tmp_path, golden, capfd):
    """config.json names a model type and code unknown to transformers; the tokenizer needs neither."""
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text((golden / "llada2-tiny" / "config.json").read_text())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for changed in (
        settings,
        {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
        {"tokenizer_class": "Qwen2Tokenizer"},
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(changed))
        assert TextCodec.open(tmp_path).encode_prompt("hello", use_chat_template=False) == ids("hello")
    assert capfd.readouterr().err == ""


def test_no_tokenizer(tmp_path):
    codec = TextCodec.open(tmp_path)
    assert not codec.available
    assert (codec.mask_id, codec.eos_id, codec.has_chat_template) == (None, None, False)
    for call in (
        lambda: codec.encode_prompt("a"),
        lambda: codec.encode_messages([]),
        lambda: codec.decode([1]),
    ):
        with pytest.raises(UsageError, match=r"has no tokenizer: give the prompt as token ids with --prompt-ids"):
            call()


def test_vocabulary_and_merges_without_tokenizer_json(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"h": 0, "i": 1, "hi": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    codec = TextCodec.open(tmp_path)
    assert codec.encode_prompt("hi") == [2]
    assert codec.eos_id == 3


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "Other"}}'])
def test_damaged_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=r"tokenizer of .* cannot be loaded") as caught:
        TextCodec.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_load_messages(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "héllo"}]
    (tmp_path / "m.json").write_text(json.dumps(messages, ensure_ascii=False), encoding="utf-8")
    assert load_messages(tmp_path / "m.json") == messages


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "is not valid JSON \\(line 1"), ("{}", "must hold a list"), ("[]", "must hold a list"),
        ("[3]", "message 0 is not an object"), ('[{"role": "user"}]', "message 0 needs content, a string"),
        ('[{"role": "user", "content": "a"}, {"content": "b"}]', "message 1 needs role, a string"),
        ('[{"role": "user", "content": 3}]', "message 0 needs content, a string"),
    ],
)  # fmt: skip
def test_bad_messages(tmp_path, content, said):
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(UsageError, match=said):
        load_messages(tmp_path / "m.json")


def test_messages_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_messages(tmp_path / "m.json")
    (tmp_path / "m.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8"):
        load_messages(tmp_path / "m.json")


@pytest.fixture
def resolve(golden):
    """The ids of the tiny checkpoint, with these changes to its configuration and these flags."""

    def call(changes=(), generation=(), codec=None, mask=None, eos=None, vocab_size=512) -> TokenIds:
        raw = json.loads((golden / "llada2-tiny" / "config.json").read_text())
        raw.pop("eos_token_id")
        raw |= dict(changes)
        family = family_of(raw)
        return resolve_token_ids(
            mask_flag=mask,
            eos_flag=eos,
            config=family.config_from_hf(raw),
            generation_config=dict(generation),
            codec=codec or TextCodec(None, "here"),
            family=family,
            vocab_size=vocab_size,
            raw_config=raw,
        )

    return call


def test_order_of_sources(resolve, codec):
    config = {"mask_token_id": 20, "eos_token_id": 21}
    generation = {"mask_token_id": 30, "eos_token_id": 31}
    assert resolve(config, generation, codec, mask=10, eos=11) == TokenIds(mask_id=10, eos_id=11)
    assert resolve(config, generation, codec) == TokenIds(mask_id=20, eos_id=21)
    assert resolve({}, generation, codec) == TokenIds(mask_id=30, eos_id=31)
    assert resolve({}, {}, codec) == TokenIds(mask_id=2, eos_id=1)
    assert resolve(vocab_size=157184) == TokenIds(mask_id=156895, eos_id=156892)


def test_flag_zero_counts_as_given(resolve):
    assert resolve({"mask_token_id": 20, "eos_token_id": 21}, mask=0).mask_id == 0


def test_no_source(resolve):
    with pytest.raises(UsageError, match=r"which token id is mask: give --mask-id"):
        resolve({"eos_token_id": 21})
    with pytest.raises(UsageError, match=r"which token id is eos: give --eos-id"):
        resolve({}, mask=511)


@pytest.mark.parametrize("where", ["config", "generation"])
def test_list_of_eos_ids(resolve, where):
    lists = {"eos_token_id": [7, 8]}
    got = resolve(lists if where == "config" else {}, lists if where == "generation" else {}, mask=511)
    assert got.eos_id == 7
    assert len(got.notes) == 1
    assert "lists eos ids [7, 8]: only the first is used" in got.notes[0]


def test_ids_outside_the_vocabulary(resolve):
    for flags in ({"mask": 512}, {"mask": -1}, {"mask": 1, "eos": 512}, {"mask": 1, "eos": -2}):
        with pytest.raises(UsageError, match=r"--(mask|eos)-id -?\d+ lies outside the vocabulary of 512 tokens"):
            resolve(**flags)
    got = resolve({"mask_token_id": 600}, {"mask_token_id": 5}, eos=-1)
    assert (got.mask_id, got.eos_id) == (5, -1)
    assert "mask id 600 of config.json lies outside" in got.notes[0]
