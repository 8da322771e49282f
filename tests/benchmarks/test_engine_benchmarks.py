"""The engine's benchmarks: their arithmetic in closed form, and each script from end to end at tiny size."""

import json

import pytest

from tests.benchmarks.conftest import output_of


def sizes(**changes):
    from posttrain.planning.memory import ModelSizes

    given = {
        "parameters": 0,
        "layers": 2,
        "hidden": 4,
        "intermediate": 8,
        "heads": 2,
        "key_value_heads": 1,
        "head_size": 2,
        "vocabulary": 10,
    }
    return ModelSizes(**given | changes)


def test_the_bound_of_a_step_is_the_slower_of_reading_and_products():
    from harness.limits import Limits, decoding_bound

    model = sizes()
    # Queries 4x4, keys and values 4x2 each, output 4x4, three matrices of 4x8; the vocabulary once, tied or not.
    parameters = 2 * (16 + 8 + 8 + 16 + 3 * 32) + 40
    weights = 2 * parameters
    # Keys and values: 2 tensors, 2 layers, 1 head of 2, 3 requests of 5 tokens, 2 bytes.
    cached = 3 * 2 * 2 * 1 * 2 * 5 * 2
    slow_memory = Limits(products=1e30, reading=10.0)
    assert decoding_bound(model, 2, 3, 5, slow_memory) == pytest.approx((weights + cached) / 10)
    # Two per parameter, and four per layer, head, dimension and seen token.
    flops = 3 * (2 * parameters + 4 * 2 * 2 * 2 * 5)
    slow_products = Limits(products=10.0, reading=1e30)
    assert decoding_bound(model, 2, 3, 5, slow_products) == pytest.approx(flops / 10)


def test_a_shared_prompt_enters_the_bound_once():
    from harness.flops import Tokens, forward_flops
    from harness.limits import Limits, job_bound

    model, limits = sizes(), Limits(products=1.0, reading=1e30)
    shared = job_bound(model, 2, [[1, 2, 3]] * 4, [1] * 4, 4, limits)
    apart = job_bound(model, 2, [[1, 2, n] for n in range(4)], [1] * 4, 4, limits)
    assert shared == pytest.approx(forward_flops(model, Tokens(3, 6, 1)))
    assert apart == pytest.approx(4 * shared)


def test_useful_work_counts_prompts_for_each_answer_and_a_reference():
    from learners.utilisation import useful_flops

    model = sizes()
    head = 2 * model.vocabulary * model.hidden
    sft, reward, dpo = (useful_flops(stage, model, 10, 400) for stage in ("sft", "reward", "dpo"))
    # Three passes' worth; half of a row is seen by a token on average; answers are 65% of the tokens.
    layers = 2 * 2 * (16 + 8 + 8 + 16 + 3 * 32)
    assert sft == pytest.approx(3 * (400 * layers + 0.65 * 400 * head + 4 * 2 * 2 * 2 * 10 * 40 * 41 / 2))
    assert reward == pytest.approx(3 * (400 * layers + 4 * 2 * 2 * 2 * 20 * 20 * 21 / 2))
    assert dpo == pytest.approx(4 * (reward / 3 + 0.65 * 400 * head))


def test_jobs_share_prompts_in_groups_and_never_repeat_them(tiny_model):
    from sides.workload import PROMPTS, first_token_job, make_job
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    jobs = [make_job(tokenizer, 4, 16, 8, number) for number in range(-1, 3)]
    prompts = [{tuple(prompt) for prompt in job.prompts} for job in jobs]
    assert [len(distinct) for distinct in prompts] == [2] * 4
    assert len(set().union(*prompts)) == 8
    # Every job asks for the same lengths in its own order.
    assert len({tuple(sorted(job.lengths)) for job in jobs}) == 1
    assert len({tuple(job.lengths) for job in jobs}) == 4
    assert all(PROMPTS[0] - 8 <= len(prompt) <= PROMPTS[1] + 8 for job in jobs for prompt in job.prompts)
    assert jobs[0] == make_job(tokenizer, 4, 16, 8, -1)
    assert first_token_job(tokenizer, 4, 1, 0).lengths == [1] * 4


@pytest.mark.slow
def test_generation_compares_the_engines_and_leaves_out_missing_ones(tmp_path, monkeypatch):
    monkeypatch.delenv("POSTTRAIN_VLLM_PYTHON", raising=False)
    file = tmp_path / "table.json"
    output_of(
        "generation", "--model=qwen3", "--in-flight=2", "--groups=2", "--requests=4", "--rounds=1", "--threads=1",
        "--sides=posttrain float32,generate float32,vLLM,llama.cpp", "--vllm-python=/nonexistent/python",
        "--llama-server=/nonexistent/llama-server", "--json", str(file),
    )  # fmt: skip
    table = json.loads(file.read_text())
    rows = {row["side"]: row for row in table["rows"]}
    assert set(rows) == {"posttrain float32", "generate float32"}
    for name in ("vLLM", "llama.cpp"):
        assert any(note.startswith(f"{name} is left out") for note in table["notes"])
    ours, theirs = rows["posttrain float32"], rows["generate float32"]
    assert ours["x generate"] == pytest.approx(ours["tokens/s"] / theirs["tokens/s"])
    assert theirs["x generate"] == pytest.approx(1.0)
    assert ours["x vLLM"] is None
    assert ours["x llama.cpp"] is None
    # Half of the prompts stand in for their neighbours, but for the last token.
    assert 0.45 < ours["prompts reused"] < 0.55
    assert theirs["prompts reused"] == 0
    assert all(row["peak GB"] > 0.05 and row["first token s"] > 0 for row in rows.values())
    assert all(1 < row["per processor s"] < 1e6 for row in rows.values())
