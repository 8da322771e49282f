"""lm-eval and inspect-ai on `posttrain serve`: their own model classes get the numbers that transformers has."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROWS = [
    {"question": f"What is {a} plus {b}?", "choices": [str(a + b), str(a - b), "a dog"], "answer": 0, "sum": str(a + b)}
    for a in range(4, 9)
    for b in range(1, 5)
]
SOURCE = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {}}}}}\ntest_split: test\n"
TASKS = {
    "choice": """
task: choice
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "answer": """
task: answer
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: sum
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "text": """
task: text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
metric_list: [{metric: word_perplexity}]
""",
}


@pytest.fixture(scope="module")
def url(tiny_model, tmp_path_factory):
    command = [sys.executable, "-m", "posttrain.cli.main", "serve", str(tiny_model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()


def test_lm_eval_has_the_numbers_of_transformers(url, tiny_model, tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = []
    for name, text in TASKS.items():
        files.append(str(tmp_path / f"{name}.yaml"))
        (tmp_path / f"{name}.yaml").write_text(text + SOURCE.format(tmp_path / "rows.jsonl"))
    models = (
        LocalCompletionsAPI(
            model="m",
            base_url=f"{url}/completions",
            tokenizer=str(tiny_model),
            tokenizer_backend="huggingface",
            num_concurrent=1,
            batch_size=4,
            max_length=256,
        ),
        HFLM(pretrained=str(tiny_model), device="cpu", batch_size=4, dtype="float32", max_length=256),
    )
    served, exact = (simple_evaluate(model, tasks=files, bootstrap_iters=0) for model in models)
    for task in TASKS:
        for one, other in zip(served["samples"][task], exact["samples"][task], strict=True):
            if task == "answer":
                assert one["resps"] == other["resps"]
                continue
            # A continuation has its log-likelihood, and whether it is greedy; a text its log-likelihood alone.
            pairs = zip(np.ravel(one["resps"]), np.ravel(other["resps"]), strict=True)
            assert all(float(a) == pytest.approx(float(b), abs=1e-3) for a, b in pairs)
    assert served["results"]["choice"]["acc,none"] == exact["results"]["choice"]["acc,none"]


def test_inspect_has_the_answers_of_the_engine(url, tiny_model, tmp_path, monkeypatch):
    inspect_ai = pytest.importorskip("inspect_ai")
    import openai
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes

    monkeypatch.setenv("POSTTRAIN_API_KEY", "none")
    monkeypatch.setenv("POSTTRAIN_BASE_URL", url)
    task = inspect_ai.Task(
        dataset=[Sample(input=f"Say {letter}.", target=letter) for letter in "abcdef"], scorer=includes()
    )
    (log,) = inspect_ai.eval(
        task, model="openai-api/posttrain/m", log_dir=str(tmp_path), display="none", max_tokens=6, temperature=0.0
    )
    assert log.status == "success", log.error
    client = openai.OpenAI(base_url=url, api_key="none")
    for sample in log.samples:
        messages = [{"role": "user", "content": sample.input}]
        answer = client.chat.completions.create(model="m", messages=messages, max_tokens=6, temperature=0)
        assert sample.output.completion == answer.choices[0].message.content
