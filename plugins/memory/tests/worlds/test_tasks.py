"""Every task is solved by its solution and not by similar ones, and its truth is in the notes."""

import ast

from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.memory.tests.worlds.scenarios import apply_solution

from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.tools import tools
from posttrain_memory.vault.vault import Vault
from posttrain_memory.worlds.generation import MAKERS, question_key, tasks_of
from posttrain_memory.worlds.recipe import RewardWeights, WorldRecipe
from posttrain_memory.worlds.render import make_world
from posttrain_memory.worlds.replies import asks
from posttrain_memory.worlds.rewards import score
from posttrain_memory.worlds.task import KINDS, VARIANTS
from posttrain_memory.worlds.theme import themes
from posttrain_memory.worlds.truth import parse

MANY = WorldRecipe(notes=16, retrieval=6, update=9, clarification=5, filter=5)
WEIGHTS = RewardWeights()
SEEDS = st.integers(0, 2**63 - 1)


def worlds(seed):
    theme = sorted(themes())[seed % len(themes())]
    recipe = MANY.model_copy(update={"themes": (theme,), "back_links": seed % 2 == 0})
    return make_world(seed, recipe), recipe


def outcome(task, world, after, reply=None):
    reply = task.reply if reply is None else reply
    return score(task, world.files, after, reply, asks(reply), len(task.solution), WEIGHTS)


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_solutions_succeed_and_tasks_are_distinguished(seed):
    world, recipe = worlds(seed)
    tasks = tasks_of(world, recipe)
    assert len({question_key(task) for task in tasks}) == len(tasks) >= 15
    for task in tasks:
        assert 1 <= len(task.code) <= 4
        assert task.code[0] == 'user = read_file("user.md")'
        scored = outcome(task, world, apply_solution(task, world.files))
        assert scored.success, (task, scored.faults)
        assert asks(task.reply) == task.asks
        assert task.hops in (0, 1, 2)
        assert task.variant in VARIANTS[task.kind]


@settings(max_examples=6, deadline=None)
@given(seed=SEEDS, place=st.floats(0, 1))
def test_a_solution_with_a_part_changed_fails(seed, place):
    world, recipe = worlds(seed)
    for task in tasks_of(world, recipe):
        after = apply_solution(task, world.files)
        if task.kind == "update":
            assert not outcome(task, world, dict(world.files)).success
            written = sorted(path for path in {*after, *world.files} if after.get(path) != world.files.get(path))
            for path in written:
                # Each of the notes that the solution writes is needed, as it is.
                half = {p: t for p, t in {**after, path: world.files.get(path)}.items() if t is not None}
                back_link_only = task.variant == "relink" and path != task.truth["change"]["about"]
                assert not outcome(task, world, half).success or back_link_only
        words = task.reply.split()
        # Less than half of it; where a refusal follows the answer, the refusal alone; half a refusal is one.
        cut = " ".join(words[: int(place * len(words) / 2)]) if len(words) > 4 and task.variant != "hide_all" else ""
        cut = task.reply[task.reply.index("I may not") :] if task.variant in ("hide_some", "allow_only") else cut
        if task.kind != "update":
            assert not outcome(task, world, after, cut or "Well.").success, (task, cut)
        assert not score(task, world.files, after, task.reply, not task.asks, 1, WEIGHTS).success
        assert not score(task, world.files, after, None, False, 1, WEIGHTS).success


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS)
def test_the_truth_is_in_the_notes(seed):
    world, recipe = worlds(seed)
    parsed = parse(world.files, world.graph.theme_name)
    facts = {(s.about, s.key): set() for s in parsed.statements}
    for s in parsed.statements:
        facts[s.about, s.key].add(s.value)
    for task in tasks_of(world, recipe):
        for record in task.truth.get("answers", ()):
            if record["type"] == "name":
                assert record["value"] in {t.casefold().removeprefix("the ") for t in parsed.titles.values()}
            elif task.variant not in ("aggregate", "time"):
                holders = [
                    about
                    for (about, key), values in facts.items()
                    if key == record["key"] and values == {record["value"]}
                ]
                assert any(world.graph.distances()[about] <= max(task.hops, 2) for about in holders) or task.hops == 2
        if task.variant == "no_attribute":
            named = [p for p, title in parsed.titles.items() if title == task.truth["point"][0]]
            assert (named[0], task.truth["key"]) not in facts
        if task.variant == "contradiction":
            assert any(values == set(task.truth["values"]) for values in facts.values())
        if task.variant == "no_entity":
            assert task.truth["point"][0] not in "\n".join(world.files.values())
            assert task.truth["point"][0] in task.question


def test_every_variant_of_every_kind_is_made():
    assert set(MAKERS) == {variant for variants in VARIANTS.values() for variant in variants}
    made = {task.variant for seed in range(12) for task in tasks_of(*worlds(seed))}
    assert made == set(MAKERS)


def test_a_recipe_can_name_the_variants():
    for kind, variants in VARIANTS.items():
        for variant in variants:
            recipe = WorldRecipe(notes=16, variants=(variant,), **dict.fromkeys(KINDS, 3))
            tasks = [task for seed in range(3) for task in tasks_of(make_world(seed, recipe), recipe)]
            assert {(task.kind, task.variant) for task in tasks} == {(kind, variant)}


def test_tasks_of_one_kind_do_not_depend_on_the_others():
    world, recipe = worlds(4)
    alone = recipe.model_copy(update={"retrieval": 0, "clarification": 0, "filter": 0})
    both = [task for task in tasks_of(world, recipe) if task.kind == "update"]
    assert tasks_of(world, alone) == both


def test_solutions_run_in_the_interpreter_and_only_updates_write(shared_interpreter):
    world, recipe = worlds(9)
    for task in tasks_of(world, recipe):
        vault = Vault(MemoryStorage(dict(world.files)))
        for code in task.code:
            assert all(isinstance(step, ast.Assign | ast.Expr) for step in ast.parse(code).body)
            ran = shared_interpreter.run(code, tools(vault))
            assert ran.error is None, (code, ran.error)
        assert vault.files() == apply_solution(task, world.files)
        assert bool(vault.journal.entries()) == (task.kind == "update")
