"""inspect-ai on our models: the provider, tools, and logs in comparisons."""

import shutil
from pathlib import Path

import pytest

from posttrain.errors import InputError
from posttrain.evaluation.compare import compare
from posttrain.evaluation.sides import read_sides

inspect_ai = pytest.importorskip("inspect_ai", reason="needs posttrain[inspect]")
pytest.importorskip("openai", reason="needs posttrain[remote]")


def evaluated(task, model, folder, **settings):
    from inspect_ai import eval as evaluate

    (log,) = evaluate(
        task, model=f"posttrain/{model}", log_dir=str(folder), display="none", max_tokens=6, temperature=0.0, **settings
    )
    assert log.status == "success", log.error
    return log


def with_tools(model, folder):
    """A copy of `model` whose chat template has tools."""
    shutil.copytree(model, folder)
    template = Path(__file__).parent.parent / "data" / "templates" / "qwen2_5.jinja"
    shutil.copy(template, folder / "chat_template.jinja")
    return folder


def task_of(letters, **settings):
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes

    samples = [Sample(input=f"Say {letter}.", target=letter, id=letter) for letter in letters]
    return Task(dataset=samples, scorer=includes(), **settings)


def test_answers_are_those_of_the_engine_and_logs_are_compared(tiny_model, tiny_policy, tmp_path):
    import asyncio

    from posttrain.data.rendering import Renderer
    from posttrain.engines.local.engine import LocalEngine
    from posttrain.engines.protocol import Request
    from posttrain.recipe.rollout import SamplingRecipe

    logs = [
        evaluated(task_of("abcdef"), tiny_model, tmp_path / "one"),
        evaluated(task_of("abcdef"), "made:small", tmp_path),
    ]
    renderer = Renderer(tiny_policy.tokenizer, tiny_policy.end_tokens)
    engine = LocalEngine(tiny_policy)
    for sample in logs[0].samples:
        prompt = renderer.prompt([{"role": "user", "content": sample.input}])
        asked = Request(tuple(prompt), SamplingRecipe(temperature=0.0), 0, 6)
        assert sample.output.completion == renderer.answer_text(asyncio.run(engine.generate(asked)).ids)
        assert sample.output.usage.input_tokens == len(prompt)
    comparison = compare(read_sides([log.location for log in logs]))
    assert [test.metric for _, test in comparison.tests] == ["includes"]
    assert comparison.tests[0][1].n == 6


def test_tools_are_in_the_prompt_and_calls_are_executed(tiny_model, tmp_path, monkeypatch):
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    from posttrain.engines.local.engine import LocalEngine
    from posttrain.engines.protocol import Completion
    from posttrain.episode import StopReason

    asked = []

    @tool
    def add():
        async def execute(x: int, y: int):
            """Add two numbers.

            Args:
                x: First number.
                y: Second number.
            """
            asked.append((x, y))
            return x + y

        return execute

    sampled = ['<tool_call>\n{"name": "add", "arguments": {"x": 2, "y": 3}}\n</tool_call>', "It is a 5"]
    prompts = []

    async def answer(self, request, on_token=None):
        prompts.append(self.policy.tokenizer.decode(list(request.prompt_ids)))
        ids = self.policy.tokenizer.encode(sampled[len(prompts) - 1], add_special_tokens=False)
        return Completion(tuple(ids), (0.0,) * len(ids), (0,) * len(ids), StopReason.END_TOKEN)

    monkeypatch.setattr(LocalEngine, "generate", answer)  # a random model never calls a tool
    model = with_tools(tiny_model, tmp_path / "model")
    log = evaluated(task_of("5", solver=[use_tools(add()), generate()]), model, tmp_path)
    assert asked == [(2, 3)]
    assert "Add two numbers." in prompts[0]
    assert "5" in prompts[1]
    assert [message.role for message in log.samples[0].messages] == ["user", "assistant", "tool", "assistant"]


def test_a_file_that_is_no_log_is_refused(tmp_path):
    (tmp_path / "x.eval").write_text("no log")
    with pytest.raises(InputError, match="not a log of inspect-ai"):
        read_sides([str(tmp_path / "x.eval"), str(tmp_path / "x.eval")])
