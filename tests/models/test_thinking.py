"""`model.thinking`: one switch for every place that renders conversations, kept in the exported model."""

import json

import pytest

from posttrain.cli.main import main
from posttrain.data.rendering import Renderer, render_conversation
from posttrain.errors import InputError
from posttrain.models.load import load_tokenizer
from posttrain.models.policy import Policy
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.model import ModelRecipe, stored_thinking
from posttrain.recipe.warnings import recipe_warnings
from posttrain.runs.directory import RunDirectory
from tests.conftest import save_tiny_model

SWITCHED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.last and '</think>' not in m.content %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if SWITCH is defined and SWITCH is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
"""A template in the manner of Qwen3: without thinking, an empty block is put before the answer."""
EMPTY = "<think>\n\n</think>\n\n"
QUESTION = [{"role": "user", "content": "How far is the lake?"}]


def switched_model(directory, name="enable_thinking"):
    save_tiny_model(directory)
    (directory / "chat_template.jinja").write_text(SWITCHED.replace("SWITCH", name))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return switched_model(tmp_path_factory.mktemp("thinking") / "model")


def renderer(path, thinking):
    tokenizer = load_tokenizer(ModelRecipe(path=str(path), thinking=thinking))
    return Renderer(tokenizer, frozenset({tokenizer.eos_token_id}))


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_the_switch_of_the_template_is_set(tmp_path, name):
    path = switched_model(tmp_path / "model", name)
    prompts = {thinking: renderer(path, thinking).text(QUESTION) for thinking in ("template", "on", "off")}
    assert prompts["template"] == prompts["on"]
    assert prompts["off"] == prompts["on"] + EMPTY


def test_without_thinking_the_empty_block_is_context_and_not_trained_on(model):
    messages = [*QUESTION, {"role": "assistant", "content": "Two miles."}]
    for thinking, trained in (("template", EMPTY + "Two miles.<|im_end|>"), ("off", "Two miles.<|im_end|>")):
        rendered = renderer(model, thinking)
        (stream,) = render_conversation(rendered, messages, "assistant")
        assert rendered.tokenizer.decode(stream.ids[stream.trained]) == trained
        # The same tokens in both; only what counts as the answer differs.
        assert rendered.tokenizer.decode(stream.ids).endswith(f"assistant\n{EMPTY}Two miles.<|im_end|>")


def test_the_exported_model_keeps_the_setting_and_a_later_one_replaces_it(model, tmp_path):
    first = Policy(str(model), thinking="off")
    first.export(tmp_path / "first")
    assert stored_thinking(str(tmp_path / "first")) == "off"
    assert renderer(tmp_path / "first", "template").text(QUESTION).endswith(EMPTY)
    tokenizer = load_tokenizer(ModelRecipe(path=str(tmp_path / "first")))
    asked = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert not asked.endswith(EMPTY), "a caller's own setting still counts"
    again = renderer(tmp_path / "first", "on")
    assert not again.text(QUESTION).endswith(EMPTY)
    assert again.tokenizer.chat_template.count("is not defined") == 1


def test_a_template_without_a_switch_is_refused_and_on_and_off_are_text_in_a_recipe(tiny_model):
    with pytest.raises(InputError, match=r"model.thinking: the chat template of .* has no switch for thinking"):
        load_tokenizer(ModelRecipe(path=str(tiny_model), thinking="off"))
    for written, value in {"off": "off", "on": "on", "'off'": "off", "template": "template"}.items():
        assert load_recipe([], [f"model.thinking={written}"], "rl").model.thinking == value
    with pytest.raises(InputError, match=r"model\.thinking"):
        load_recipe([], ["model.thinking=1"], "rl")


def rows_noted(rendered, content):
    return rendered.thinking_problem([*QUESTION, {"role": "assistant", "content": content}])


def test_rows_of_the_other_setting_are_counted(model, tmp_path, capsys):
    assert "with thinking" in rows_noted(renderer(model, "off"), "<think>\nFar.\n</think>\n\nTwo miles.")
    assert "without thinking" in rows_noted(renderer(model, "on"), "Two miles.")
    assert rows_noted(renderer(model, "off"), "Two miles.") is None
    assert rows_noted(renderer(model, "template"), "Two miles.") is None
    rows = [{"prompt": f"Question {i}?", "completion": "<think>\na\n</think>\n\nb"} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"data.train={tmp_path / 'rows.jsonl'}", f"data.cache={tmp_path / 'cache'}", f"model.path={model}"]
    runs = [f"runs={tmp_path}", "name=first", "steps=1", "model.thinking=off"]
    assert main(["sft", *words, *runs]) == 0
    assert "3 rows with thinking although model.thinking is off" in " ".join(capsys.readouterr().out.split())
    # The next stage starts from this model with the other setting, as a policy and as a reward model.
    later = tmp_path / "first" / "model"
    found = recipe_warnings(load_recipe([], [f"model.path={later}", "model.thinking=on"], "rl"))
    assert any(f"the run {tmp_path / 'first'}, which trained {later}, had model.thinking off" in text for text in found)
    given = [f"model.path={model}", "model.thinking=on", f"reward.path={later}"]
    assert any("had model.thinking off" in text for text in recipe_warnings(load_recipe([], given, "rl")))
    for same in ("off", "template"):
        found = recipe_warnings(load_recipe([], [f"model.path={later}", f"model.thinking={same}"], "rl"))
        assert not any("model.thinking" in text for text in found)


def test_a_model_trained_on_another_format_of_answers_is_announced(tmp_path):
    given = ["environment.type=frozen_lake", "environment.format.thinking=false", f"runs={tmp_path}", "name=warm"]
    run = RunDirectory.create(load_recipe([], given, "sft"))
    model = run.path / "model"
    game = ["environment.type=frozen_lake", f"model.path={model}"]
    found = recipe_warnings(load_recipe([], [*game, "environment.format.thinking=true"], "rl"))
    assert any(
        f"environment.format.thinking is true, and the run {run.path}, which trained {model}, had "
        "environment.format.thinking false" in text
        for text in found
    )
    assert not any("format.thinking" in text for text in recipe_warnings(load_recipe([], game, "rl")))
    checkpoint = ["environment.format.thinking=true", f"model.path={run.checkpoints / 'step_000010' / 'policy'}"]
    found = recipe_warnings(load_recipe([], [game[0], *checkpoint], "evaluate"))
    assert any("had environment.format.thinking false" in text for text in found)


def test_a_format_with_thinking_goes_with_a_template_that_thinks():
    game = ["environment.type=frozen_lake", "model.thinking=off"]
    found = recipe_warnings(load_recipe([], [*game, "environment.format.thinking=true"], "rl"))
    assert any("environment.format.thinking is true, and model.thinking is off" in text for text in found)
    assert not any("ask for different answers" in text for text in recipe_warnings(load_recipe([], game, "rl")))


def test_stages_of_a_pipeline_are_compared_before_any_runs(tmp_path, capsys):
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "stage: pipeline\nname: both\ncommon: {environment: {type: frozen_lake}}\nstages:\n"
        "- {name: sft, stage: sft}\n"
        "- {name: rl, from: sft, stage: rl, environment: {format: {thinking: true}}}\n"
    )
    assert main(["pipeline", str(file), "--dry-run"]) == 0
    assert "stage rl: warning: environment.format.thinking is true, and stage sft" in capsys.readouterr().out
