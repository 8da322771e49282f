"""The plan of a distillation: the teacher's memory."""

from posttrain.planning.dry_run import batch_arithmetic
from posttrain.planning.memory import memory_estimate
from posttrain.planning.model_sizes import ModelSizes
from posttrain.recipe.distill import DistillRecipe
from posttrain.recipe.rl import RlRecipe

SIZES = ModelSizes(1_000_000, 2, 64, 128, 4, 2, 16, 1000)
SMOL = 134_515_008


def recipe(teacher, **keys):
    return DistillRecipe.model_validate({"teacher": teacher, "learner": {"logits_per_chunk": 100}} | keys)


def memory(teacher, **keys):
    return memory_estimate(recipe(teacher, **keys), SIZES)


def test_memory_of_local_remote_and_shared_teachers():
    assert memory({"path": "packaged:smollm2-135m"})["teacher"][0] == 4 * SMOL
    assert memory({"path": "packaged:smollm2-135m", "dtype": "bfloat16"})["teacher"][0] == 2 * SMOL
    assert memory({"path": "runs/later/model"})["teacher"] == (4_000_000, "assuming the size of the policy")
    in_the_reward = RlRecipe.model_validate({"teacher": {"path": "packaged:smollm2-135m"}})
    assert memory_estimate(in_the_reward, SIZES)["teacher"][0] == 4 * SMOL
    assert memory({"urls": ["http://a/v1"]})["teacher"][0] == 0
    assert memory({"policy": "current", "context": "x"})["teacher"][0] == 0
    assert memory({"policy": "initial", "context": "x"})["teacher"][0] == 4_000_000
    assert memory({"policy": "initial", "context": "x"}, model={"lora": {}})["teacher"][0] == 0


def test_memory_of_distributions_by_candidates_or_vocabulary():
    rollout = {"groups_per_step": 2, "episodes_per_group": 3, "tokens_per_turn": 10}
    environment = {"type": "bandit"}
    tokens = 2 * 3 * 10 * recipe({"path": "a"}, environment=environment).environment.max_turns
    assert "teacher's distributions, at most" not in memory({"path": "a"})
    for top_k, size in ((50, 50 * 8), (None, 1000 * 4)):
        rows = memory({"path": "a"}, loss={"type": "jsd", "top_k": top_k}, rollout=rollout, environment=environment)
        assert rows["teacher's distributions, at most"][0] == tokens * size
        assert rows["logits"][0] == 24 * 100 * 1000


def test_the_arithmetic_names_the_teacher_and_the_fixed_rows():
    rows = {"data": {"train": "rows.jsonl"}, "share": 0.25}
    lines = batch_arithmetic(recipe({"path": "a"}, loss={"type": "jsd"}, off_policy=rows, steps=40))
    assert "teacher: a" in lines
    assert any("about 10 of 40 steps" in line for line in lines)
