"""Every kind of invalid input has one exact sentence, and valid recipes survive a round trip."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.recipe.compose import dump_recipe, load_recipe
from posttrain.recipe.model import LoraRecipe
from posttrain.recipe.sources import dump_values, merge, read_text
from posttrain.recipe.warnings import recipe_warnings

VLLM, AHEAD = ["engine.type=vllm"], ["rollout.async_rollouts=2"]
COOL = ["rollout.sampling.temperature=0.7", "rollout.sampling.top_p=0.95"]
SCORED = ["environment.type=text_task", "environment.prompts=x.jsonl", "environment.reward=rewards.py:score"]


def complaint(*overrides, sources=(), stage="rl"):
    with pytest.raises(InputError) as caught:
        load_recipe([str(source) for source in sources], list(overrides), stage)
    return str(caught.value)


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    """A function that writes text to r.yaml in the working directory and returns that name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="r.yaml"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "r.yaml is empty; write at least one `key: value` line, or remove the file"),
        ("- 1\n", "r.yaml line 1: a recipe consists of `key: value` lines"),
        ("kl:\n\tcoefficient: 1\n", "r.yaml line 2: a tab is used for indentation; use spaces"),
        ("steps: 1\nsteps: 2\n", "r.yaml line 2: steps is also given in line 1; keep one of them"),
        ("1: 2\n", "r.yaml line 1: 1 is not a key; keys are text"),
        ("a: &a [*a]\n", "r.yaml line 1: the alias contains itself"),
        (b"name: \xff\n", "r.yaml is not a recipe: byte 6 is not UTF-8 text; name a YAML file"),
        ("name: x\x01\n", "r.yaml is not YAML: unacceptable character #x0001: special characters are not allowed"),
        ("stage: sft\n", "r.yaml line 1: the recipe is for stage sft, not rl; run it with `posttrain sft`"),
        ("stage: tune\n", "the recipe is for stage tune, not rl; run it with `posttrain tune`"),
        ("stage: evalaute\n", 'r.yaml line 1: stage is "evalaute" (did you mean evaluate?); it must be rl, distill'),
        (
            "rollout:\n  group_per_step: 3\n",
            "line 2: there is no key rollout.group_per_step; the nearest is rollout.groups_per_step",
        ),
    ],
)
def test_error_of_a_bad_file_names_the_line(recipe_file, text, expected):
    assert expected in complaint(sources=[recipe_file(text)])


def test_a_change_of_what_was_read_is_not_read_again():
    for _ in range(2):
        layer = read_text("a: {b: [1]}", "r.yaml")
        assert (layer.values, layer.origin(("a", "b"))) == ({"a": {"b": [1]}}, "r.yaml line 1")
        layer.values["a"]["b"].append(2)
        layer.origins.clear()


def test_a_missing_file(recipe_file, tmp_path):
    (tmp_path / "folder").mkdir()
    assert "there is no recipe file no.yaml; name a YAML file or a recipe" in complaint(sources=["no.yaml"])
    assert complaint(sources=["folder"]) == "folder is a directory; name a recipe file in it"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["lerning_rate=1"], "the nearest is optimizer.learning_rate"),
        (['rollout.stop_strings=[""]'], "empty stop string"),
        (["kl.zork=1"], "there is no key kl.zork; the keys of kl are apply_to, coefficient, estimator, horizon"),
        (["environment.size=4"], "there is no key environment.size; it belongs to environment.type frozen_lake"),
        (["loss.type=gsop"], 'loss.type is "gsop" (did you mean gspo?); it must be ppo, gspo, gspo_token, cispo'),
        (["loss.type=grpo"], 'loss.type is "grpo" (a type of credit: write `credit.type=grpo`); it must be ppo'),
        (["model.device=mps"], 'model.device is "mps" (did you mean cpu?)'),
        (["environment.type=bandt"], "there is no environment 'bandt' (did you mean bandit?); use one of bandit, "),
        (["environment.type=3"], "override environment.type=3: environment.type is 3; it must be text"),
        (["optimizer.betas=[0.9]"], "optimizer.betas is missing; it must be a list of 2 numbers"),
        (["model.dtype=fp16"], 'model.dtype is "fp16"; it must be float32, bfloat16 or auto, or null'),
        (["sinks=wandb"], 'sinks is "wandb"; it must be a list of tensorboard, wandb or trackio'),
        (
            ["name=3"],
            "name is 3; it must be text of up to 200 letters, digits, `.`, `_` and `-`, the first a letter or digit, in quotes",
        ),
        (["rollout.episodes_per_group=1", "credit.type=grpo"], "`credit.type: grpo` compares the episodes"),
        (["learner.updates_per_step=9"], "`learner.updates_per_step` (9) is more than the groups of a step (8)"),
        (["rollout.tokens_per_episode=8192"], "= 8192 tokens, more than `learner.tokens_per_batch` = 4096"),
        (["loss.aggregation=constant"], "loss: set `constant` if and only if `aggregation: constant`"),
        (["rolout.group_per_step=4"], "the nearest is rollout.groups_per_step"),
        (["evaluation.samplng.temperature=0"], "the nearest is evaluation.sampling.temperature"),
        (["environment={type: text_task, reward: [{functon: exact}]}"], "the nearest is environment.reward.function"),
        (["environment={type: text_task, reward: [exact, exakt]}"], "(did you mean exact?)"),
        (
            ["environment={type: text_task, reward: [{weight: a}]}"],
            'environment.reward.weight is "a"; it must be a number',
        ),
        (["a..b=1"], "override a..b=1: 'a..b' is not a dotted key; write `section.key=value`"),
        (["steps"], "override 'steps' has no value; write `steps=value`"),
        (["sinks=[a"], "override sinks=[a: the value is not YAML; quote it if it is text"),
        (["sinks=&a [*a]"], "override sinks=&a [*a] line 1: the alias contains itself"),
        (
            ["sinks=[{a: 1, a: 2}]"],
            "override sinks=[{a: 1, a: 2}] line 1: 0.a is also given in line 1; keep one of them",
        ),
        ([*VLLM, "engine.urls=[http://a:1]", "engine.servers=2"], "`servers` has no effect: urls is"),
        ([*VLLM, "engine.urls=[a:1]"], "must begin with http"),
        ([*VLLM, "engine.adapters=adapter_only"], "set `model.lora`"),
        ([*VLLM, *COOL, "loss.old=rollout"], "`loss.old: rollout` would treat truncation"),
        ([*VLLM, *COOL, "loss.correction.weights=sequence"], "`loss.correction.weights: sequence` would treat"),
        (
            [*AHEAD, "rollout.max_staleness=3", "learner.updates_per_step=2"],
            "every episode is 4 updates old when it is",
        ),
        ([*AHEAD, "rollout.on_new_weights=continue", "hardware.ray=auto"], "load new weights only between"),
        ([*AHEAD, "reward.path=x", "hardware.processes=2"], "only the first process samples and scores"),
        (["credit.type=pass_at_k", "credit.k=5", "rollout.episodes_per_group=4"], "`credit.k` (5) is more than"),
        (["credit.type=gdpo", *SCORED, "rollout.episodes_per_group=1"], "compares the episodes of a group"),
        (["credit.type=maxrl", "rollout.missing_eos_penalty=1"], "`rollout.missing_eos_penalty` can make returns"),
        (["credit.type=maxrl", "kl.coefficient=0.1", "kl.apply_to=reward", "kl.estimator=k1"], "`kl.apply_to` can"),
        (["credit.type=maxrl", *SCORED, "teacher.path=t"], "`teacher` can make returns negative"),
        (
            ["credit.type=maxrl", "environment.type=frozen_lake"],
            "`environment.format.penalty` can make returns negative",
        ),
        (["credit.type=maxrl", "environment.type=bandit", "environment.format.penalty=0"], "`environment.low_risk`"),
        (["credit.type=gdpo", "environment.type=bandit"], "`environment.type: bandit`) reports none"),
        (["credit.type=gdpo", *SCORED, "environment.reward=exact"], "`environment.type: text_task`) reports none"),
        (["sinks=[wandb]", "sinks.x=1"], "sinks: given both as a list and as a section; keep one of them"),
    ],
)
def test_error_of_a_bad_override_names_the_remedy(overrides, expected):
    assert expected in complaint(*overrides)


def test_every_problem_has_its_own_sentence(recipe_file):
    file = recipe_file("environment:\n  type: frozen_lake\n  sze: 4\nsteps: 0\nkl: {coefficient: -1}\n")
    assert complaint(sources=[file]).splitlines() == [
        "r.yaml line 3: there is no key environment.sze; the nearest is environment.size",
        "r.yaml line 4: steps is 0; it must be a whole number, 1 or more",
        "r.yaml line 5: kl.coefficient is -1; it must be a number, 0 or more",
    ]


def test_an_environment_file_that_fails_to_load_is_named(recipe_file):
    recipe_file("def broken(:\n", "mine.py")
    assert complaint("environment.type=mine.py").startswith("override environment.type=mine.py: ")
    assert "mine.py failed to load with SyntaxError" in complaint("environment.type=mine.py")


def test_a_required_key_is_refused_until_it_is_set(recipe_file):
    text = "stage: rl\nenvironment:\n  type: text_task\n  prompts:\n  - ???\n  reward: ??? set it to FILE.py:FUNCTION\n"
    file = recipe_file(text)
    assert complaint(sources=[file]).splitlines() == [
        f"{file} line 5: environment.prompts.0 is required and has no value; set it in the recipe, or add "
        "environment.prompts.0=VALUE",
        f"{file} line 6: environment.reward is required and has no value; set it to FILE.py:FUNCTION",
    ]
    words = ["environment.prompts=rows.jsonl", "environment.reward=exact"]
    assert load_recipe([file], words, "rl").environment.reward == "exact"
    kept = load_recipe([], ["environment.type=text_task", *words, "environment.system=???? now"], "rl")
    assert kept.environment.system == "???? now"
    assert merge([read_text("steps: 3", "a.yaml"), read_text("steps: ???", "b.yaml")]).values == {"steps": 3}


def test_files_and_overrides_merge_left_to_right(recipe_file):
    first = recipe_file("steps: 1\nkl: {coefficient: 0.1, apply_to: reward}\nmodel: {lora: {rank: 4}}\n", "a.yaml")
    second = recipe_file("kl: {coefficient: 1e-2}\n", "b.yaml")
    recipe = load_recipe(
        [first, second], ["steps=3", "--entropy.coefficient", "0.5", "--seed=7", "model.lora=null"], "rl"
    )
    assert (recipe.steps, recipe.entropy.coefficient, recipe.seed, recipe.model.lora) == (3, 0.5, 7, None)
    assert (recipe.kl.coefficient, recipe.kl.apply_to) == (0.01, "reward")


def test_an_override_may_be_longer_than_a_file_name(capsys):
    """A long text, such as a system message."""
    assert main(["rl", "environment.type=bandit", f"name={'a b ' * 200}", "--dry-run"]) == 2
    assert "name is" in capsys.readouterr().err
    assert main(["rl", "a" * 5000, "--dry-run"]) == 2
    assert "there is no recipe file aaa" in capsys.readouterr().err


def test_a_part_of_a_default_keeps_the_rest_of_it():
    recipe = load_recipe([], ["evaluation.seeds.count=5", "evaluation.sampling.top_p=0.9", "loss.clip_high=0.3"], "rl")
    assert recipe.evaluation.seeds.of_generated("evaluation.seeds") == range(1_000_000, 1_000_005)
    assert recipe.evaluation.sampling.temperature == 0
    assert (recipe.loss.type, recipe.loss.clip_low, recipe.loss.clip_high) == ("ppo", 0.2, 0.3)


def test_a_new_type_drops_defaults_and_keys_of_the_old_type_and_hides_no_error(recipe_file):
    reinforce = load_recipe([], ["credit.type=reinforce"], "rl").credit
    assert reinforce.model_dump() == {"type": "reinforce", "discount": 1.0}
    assert load_recipe([], ["loss.type=gspo"], "rl").loss.clip_low == 3e-4
    file = recipe_file("credit: {type: gae, gae_lambda: 0.9, discount: 0.99, whiten: false}\nloss: {clip_high: 0.3}\n")
    assert load_recipe([file], ["credit.type=rloo"], "rl").credit.model_dump() == {"type": "rloo"}
    assert load_recipe([file], ["credit.type=reinforce"], "rl").credit.discount == 0.99  # both have it
    back = load_recipe([file], ["credit.type=rloo", "credit.type=gae"], "rl").credit
    assert (back.gae_lambda, back.whiten) == (0.95, True)
    assert load_recipe([file], ["loss.type=cispo", "loss.clip_high=0.4"], "rl").loss.clip_high == 0.4
    units = recipe_file(
        "reward: {path: rm}\ncredit: {type: gae}\n"
        "unit_credit: {type: prefix, probe: separate, beta: 0.5, segmenter: {type: steps, max_units: 4}}\n"
    )
    found = load_recipe([units], ["unit_credit.type=loo"], "rl").unit_credit
    assert (found.beta, found.segmenter.max_units) == (0.5, 4)
    found = load_recipe([units], ["unit_credit.segmenter.type=turn"], "rl").unit_credit
    assert found.segmenter.model_dump() == {"type": "turn"}
    decoy = recipe_file("credit: {type: gae, trace_decoy: 0.9}\n", "decoy.yaml")
    assert "no key credit.trace_decoy" in complaint("credit.type=rloo", sources=[decoy])
    assert "no key credit.gae_lambda" in complaint("credit.type=rloo", "credit.gae_lambda=0.5")


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        ("rl", []),
        ("rl", ["environment.type=sokoban", "credit.type=reinforce_pp", "loss.type=cispo", "model.lora.rank=4"]),
        ("rl", ["loss.correction.weights=token", "rollout.overlong_penalty={limit: 9, buffer: 2}"]),
        ("rl", ["model.lora.targets=[q_proj, v_proj]", "model.path='2026-01-01'", "runs='1e5'"]),
        ("sft", ["environment.type=frozen_lake", "experts.expert=random"]),
        ("evaluate", ["evaluation.sampling.temperature=0.7", "evaluation.episodes_per_seed=3"]),
    ],
)
def test_a_dumped_recipe_loads_as_itself(stage, overrides, recipe_file):
    recipe = load_recipe([], overrides, stage)
    again = load_recipe([recipe_file(dump_recipe(recipe))], [], stage)
    assert again == recipe
    assert type(again.environment) is type(recipe.environment)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=8)
        | st.sampled_from(["${a}", "\\${", "1e-6", "no"])
    ),
    st.floats(min_value=1e-300, max_value=1e300),
)
def test_any_text_and_number_survives_dumping_and_merging(texts, number):
    values = {"rollout": {"stop_strings": texts}, "optimizer": {"learning_rate": number}}
    layer = read_text(dump_values(values), "r.yaml")
    assert merge([layer]).values == merge([layer, layer]).values == values


@pytest.mark.parametrize(
    ("stage", "words", "message"),
    [
        ("distill", [], "teacher is missing; set teacher.path, teacher.urls or teacher.policy"),
        ("dpo", [], "data is missing; set data.train"),
        ("rl", ["model.lora=16"], "model.lora is 16; .*; write model.lora.rank=16"),
        ("rl", ["model.device=gpu"], r'model.device is "gpu" \(did you mean cuda\?\)'),
        ("sft", ["data.trian=x"], r"^override data.trian=x: there is no key data.trian; the nearest is data.train$"),
    ],
)
def test_a_wrong_form_or_case_names_the_nearest_key_or_value(stage, words, message):
    with pytest.raises(InputError, match=message):
        load_recipe([], words, stage)


# -- recipes of other stages for evaluate -------------------------------------------------------------------------------

TRAINING = """
stage: rl
name: lake
steps: 40
model: {path: some/model, dtype: bfloat16, lora: {rank: 8}, gradient_checkpointing: true}
environment: {type: frozen_lake, size: 5, format: {thinking: true}}
credit: {type: grpo}
rollout: {tokens_per_turn: 90, groups_per_step: 2, sampling: {temperature: 0.7}, stop_strings: [</answer>]}
evaluation: {every: 7, sampling: {temperature: 0.3}, metric: return}
"""


@pytest.fixture
def training(tmp_path):
    (tmp_path / "rl.yaml").write_text(TRAINING)
    return str(tmp_path / "rl.yaml")


def test_evaluate_takes_environment_and_sampling_from_a_recipe_of_another_stage(training):
    recipe = load_recipe([training], ["model.path=runs/lake/model"], "evaluate")
    assert (recipe.stage, recipe.name, recipe.model.path) == ("evaluate", "lake-evaluation", "runs/lake/model")
    assert (recipe.environment.size, recipe.environment.format.thinking) == (5, True)
    assert (recipe.evaluation.sampling.temperature, recipe.rollout.tokens_per_turn) == (0.3, 90)
    assert (recipe.rollout.stop_strings, recipe.model.dtype, recipe.model.lora) == (["</answer>"], "bfloat16", None)
    assert recipe_warnings(recipe) == []
    again = load_recipe([training], ["name=mine", "environment.max_turns=25"], "evaluate")
    assert (again.name, again.environment.max_turns) == ("mine", 25)


def test_a_file_beside_the_recipe_of_another_stage_continues_it(training, tmp_path):
    """Its keys of training are left out like those of the recipe, and a misspelled one is still an error."""
    own = tmp_path / "own.yaml"
    own.write_text("steps: 3\nrollout: {groups_per_step: 2, tokens_per_turn: 70}\nenvironment: {max_turns: 4}\n")
    recipe = load_recipe([training, str(own)], ["model.path=runs/lake/model"], "evaluate")
    assert (recipe.name, recipe.rollout.tokens_per_turn, recipe.environment.max_turns) == ("lake-evaluation", 70, 4)
    assert recipe.evaluation == load_recipe([training], ["model.path=runs/lake/model"], "evaluate").evaluation
    own.write_text("stepz: 3\n")
    with pytest.raises(InputError, match="stepz"):
        load_recipe([training, str(own)], [], "evaluate")


def test_evaluate_refuses_wrong_keys_of_the_other_stage_and_recipes_without_an_environment(training, tmp_path):
    assert "stepz" in complaint("stepz=3", sources=[training], stage="evaluate")
    assert "steps" in complaint("steps=3", sources=[training], stage="evaluate")
    dpo = tmp_path / "dpo.yaml"
    dpo.write_text("stage: dpo\nname: pairs\ndata: {train: pairs.jsonl}\n")
    refused = complaint(sources=[dpo], stage="evaluate")
    assert "is for stage dpo and has no environment to evaluate in" in refused
    words = ["environment.type=bandit", "model.path=runs/pairs/model"]
    assert load_recipe([str(dpo)], words, "evaluate").environment.type == "bandit"


@pytest.mark.parametrize("name", ["ragen/bandit", "ragen/sokoban_sft", "memory/gspo", "rlhf/ppo"])
def test_ready_recipes_of_all_stages_can_be_evaluated(name):
    recipe = load_recipe([name], ["model.path=packaged:smollm2-135m"], "evaluate")
    assert recipe.stage == "evaluate"
    assert recipe.name.endswith("-evaluation")
    assert not any("has no effect" in warning for warning in recipe_warnings(recipe))


# -- the environment of evaluations -------------------------------------------------------------------------------------


def test_the_environment_of_evaluations_inherits_the_keys_of_training(training):
    words = ["evaluation.environment.max_turns=25", "evaluation.environment.format.penalty=-2"]
    recipe = load_recipe([training], words, "rl")
    assert (recipe.environment.max_turns, recipe.evaluation.environment.max_turns) == (5, 25)
    own = recipe.evaluation.environment
    assert (own.type, own.size, own.format.thinking, own.format.penalty) == ("frozen_lake", 5, True, -2)
    assert load_recipe([], ["evaluation.environment.max_turns=3"], "rl").evaluation.environment.type == "bandit"
    # Read again, it is the same, also where training has changed since.
    text = dump_recipe(recipe)
    (Path(training).parent / "again.yaml").write_text(text)
    assert load_recipe([str(Path(training).parent / "again.yaml")], [], "rl") == recipe


def test_another_type_keeps_no_key_of_the_environment_of_training(training):
    recipe = load_recipe([training], ["evaluation.environment.type=sokoban"], "rl")
    assert (recipe.evaluation.environment.dim_x, recipe.evaluation.environment.format.thinking) == (6, False)
    sft = load_recipe([], ["data.train=rows.jsonl", "evaluation.environment.type=bandit"], "sft")
    assert (sft.environment, sft.evaluation.environment.type) == (None, "bandit")
    played = load_recipe([training], ["evaluation.environment.max_turns=25", "model.path=m"], "evaluate")
    assert (played.environment.max_turns, played.environment.size, played.evaluation.environment) == (25, 5, None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["evaluation.environment.max_turn=3"], "override evaluation.environment.max_turn=3: there is no key"),
        (["evaluation.environment.size=x"], "evaluation.environment.size"),
        (["seeds.start=1000000"], "`evaluation.seeds`"),
    ],
)
def test_mistakes_in_the_environment_of_evaluations_are_named(training, words, expected):
    assert expected in complaint("evaluation.environment.max_turns=9", *words, sources=[training])


@pytest.mark.parametrize(
    "override",
    [
        *("seed=9223372036854775808", "seed=1" + "0" * 30, "seed=-1", "learner.tokens_per_batch=1" + "0" * 30),
        *("seeds.start=18446744073709551610", "seeds.start=9223372036854775807", "seeds.count=9223372036854775807"),
    ],
)
def test_numbers_that_no_array_holds_are_refused(override):
    with pytest.raises(InputError, match=override.partition("=")[0]):
        load_recipe([], ["environment.type=bandit", override], "rl")
    largest = ["seed=9223372036854775807", "seeds.start=4611686018427387903", "seeds.count=100000000"]
    recipe = load_recipe([], ["environment.type=bandit", *largest], "rl")
    assert recipe.seeds.of_generated("seeds").stop < 2**63


@pytest.mark.parametrize(
    ("stage", "words", "rate"),
    [
        ("sft", [], 1e-5),
        ("sft", ["model.lora=true"], 1e-4),
        ("sft", ["model.lora.rank=8", "optimizer.warmup_updates=2"], 1e-4),
        ("dpo", ["model.lora={}"], 1e-5),
        ("rl", ["model.lora.rank=8", "optimizer.learning_rate=3e-5"], 3e-5),
        ("rl", ["model.lora=null"], 1e-5),
    ],
)
def test_adapters_have_ten_times_the_default_rate(stage, words, rate):
    data = [] if stage == "rl" else ["data.train=a.jsonl"]
    recipe = load_recipe([], [*data, *words], stage)
    assert recipe.optimizer.learning_rate == pytest.approx(rate)
    assert "model.lora=true" not in words or recipe.model.lora == LoraRecipe()
    assert load_recipe([], [*data, f"optimizer.learning_rate={rate!r}", *words], stage).optimizer == recipe.optimizer
