"""The adapter for lm-evaluation-harness, where that is installed: no network, a task of two questions."""

import json
from types import SimpleNamespace

import pytest

from oled_jax.errors import UsageError
from oled_jax.machine import CACHE_VARIABLE, MEMORY_FRACTION_VARIABLE

# The harness and its libraries warn of what is theirs.
pytestmark = pytest.mark.filterwarnings("default")
SETTINGS = {"block_length": 8, "threshold": 0.3}
QUESTIONS = ("one", "two two two")


@pytest.fixture(scope="module")
def adapter():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")
        pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
        from oled_jax import evaluation

        yield evaluation


@pytest.fixture(scope="module")
def model(adapter, talking_model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("programs")))
        return adapter.HarnessModel(str(talking_model), batch_size="2", expert_cache=6, positions=64, **SETTINGS)


def requests(*pairs):
    return [SimpleNamespace(args=pair) for pair in pairs]


def test_answers_are_those_of_the_model_cut_at_stop_strings(model):
    text = model.apply_chat_template([{"role": "user", "content": "one"}])
    assert text == "(user)one:"
    assert model.chat_template(True).startswith("{% for m")
    whole = model.model.generate([{"role": "user", "content": "one"}], gen_length=16, **SETTINGS).text
    stop = whole[3:5]
    arguments = {"max_gen_toks": 16, "do_sample": False, "temperature": 0.0}
    got = model.generate_until(
        requests((text, {**arguments, "until": [stop]}), ("x" * 100, {"max_gen_toks": 8}), (text, arguments)),
        disable_tqdm=True,
    )
    assert got[0] == whole[: whole.index(stop)]
    assert got[2] == whole
    assert got[1]  # a context that is too long loses its beginning


def test_what_the_model_cannot_do_is_refused(adapter, model, talking_model):
    with pytest.raises(UsageError, match="tasks that generate"):
        model.loglikelihood([])
    with pytest.raises(UsageError, match="num_beams=3"):
        model.generate_until(requests(("x", {"num_beams": 3})))
    with pytest.raises(UsageError, match="no chat template 'other'"):
        model.chat_template("other")
    with pytest.raises(UsageError, match="whole number"):
        adapter.HarnessModel(str(talking_model), batch_size="auto", device="cuda:0")
    with pytest.raises(UsageError, match="no setting 'tresh'"):
        adapter.HarnessModel(str(talking_model), positions=64, expert_cache=6, tresh=1)


def test_a_task_of_the_harness(adapter, model, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    answers = [
        model.model.generate([{"role": "user", "content": f"Q: {q}"}], gen_length=8, **SETTINGS).text for q in QUESTIONS
    ]
    lines = [{"question": QUESTIONS[0], "answer": answers[0]}, {"question": QUESTIONS[1], "answer": "wrong"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    task = {
        "task": "tiny_questions", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "Q: {{question}}",
        "doc_to_target": "{{answer}}", "generation_kwargs": {"max_gen_toks": 8, "until": [], "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    results = simple_evaluate(
        model, tasks=[task], apply_chat_template=True, bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )  # fmt: skip
    assert results["results"]["tiny_questions"]["exact_match,none"] == 0.5
    said = sorted(sample["resps"][0][0] for sample in results["samples"]["tiny_questions"])
    assert said == sorted(answers)
