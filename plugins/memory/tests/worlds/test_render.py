"""A vault states exactly the facts of its graph, every note is reachable, and every link resolves."""

from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.vault import Vault
from posttrain_memory.worlds.graph import Statement
from posttrain_memory.worlds.recipe import WorldRecipe
from posttrain_memory.worlds.render import make_world
from posttrain_memory.worlds.theme import themes
from posttrain_memory.worlds.truth import parse

RECIPES = st.builds(
    WorldRecipe,
    themes=st.sampled_from(sorted(themes())).map(lambda name: (name,)),
    notes=st.integers(4, 30),
    near=st.floats(0.1, 1),
    facts=st.sampled_from([(1, 1), (1, 3), (2, 5), (6, 6)]),
    filler=st.sampled_from([(0, 0), (0, 4), (10, 30)]),
    namesakes=st.floats(0, 0.6),
    contradictions=st.integers(0, 3),
    confirmations=st.integers(0, 3),
    back_links=st.booleans(),
    bare=st.booleans(),
    styles=st.sampled_from([(), ("bullets",), ("bold",), ("plain",), ("table",), ("front",), ("prose",)]),
)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), recipe=RECIPES)
def test_the_vault_states_the_facts_of_the_graph(seed, recipe):
    world = make_world(seed, recipe)
    parsed = parse(world.files, world.graph.theme_name)
    assert parsed.statements == world.graph.statements()
    assert len(parsed.places) == len(parsed.statements)
    assert not parsed.broken
    assert set(parsed.reached) == set(world.files) == set(world.graph.entities)
    assert parsed.reached == world.graph.distances()
    assert len(world.files) == recipe.notes
    assert parsed.titles == {path: entity.name for path, entity in world.graph.entities.items()}
    vault = Vault(MemoryStorage(dict(world.files)))  # which resolves links in the same way
    assert all(path in vault.backlinks(other) for path, out in parsed.out.items() for other in out - {path})
    for place in parsed.places:
        text = world.files[place.statement.note]
        assert place.start <= place.value_start < place.value_end <= place.end
        assert text[place.value_start : place.value_end].strip()


def test_worlds_are_large_and_small():
    small = [
        make_world(seed, WorldRecipe(notes=4, facts=(1, 2), filler=(0, 0), bare=True, back_links=False,
                                     contradictions=0, confirmations=0))
        for seed in range(40)
    ]  # fmt: skip
    assert all(len(world.files) == 4 for world in small)
    # About three characters make a token of SmolLM2 here.
    assert sum(sum(map(len, world.files.values())) for world in small) / 40 < 800
    large = make_world(1, WorldRecipe(notes=400, filler=(5, 40)))
    parsed = parse(large.files, large.graph.theme_name)
    assert parsed.statements == large.graph.statements()
    assert len(parsed.reached) == 400
    assert max(parsed.reached.values()) > 3


def test_one_seed_is_one_world_and_the_tasks_wanted_do_not_matter():
    one, same = make_world(7, WorldRecipe()), make_world(7, WorldRecipe(retrieval=1, update=0))
    assert one.files == same.files
    assert make_world(8, WorldRecipe()).files != one.files
    assert {make_world(seed, WorldRecipe(notes=4)).graph.theme_name for seed in range(200)} == set(themes())


def test_other_notes_repeat_and_contradict_facts():
    world = make_world(5, WorldRecipe(notes=20, contradictions=2, confirmations=2))
    own = {(s.about, s.key): s.value for s in world.graph.statements() if s.note == s.about}
    agree = [own[claim.about, claim.key] == claim.value for claim in world.graph.claims]
    assert sorted(agree) == [False, False, True, True]


def test_a_note_is_read_however_a_model_writes_it():
    world = make_world(11, WorldRecipe(themes=("pets",), notes=6))
    path = next(p for p, entity in world.graph.entities.items() if entity.kind == "pet")
    name = world.graph.entities[path].name
    texts = [
        f"# {name}\n- weight: 31 kg\n",
        f"# {name}\n* **Weight:** 31\n",
        f"# {name}\nbody weight: 31kg\n",
        f"# {name}\n| Weight | 31 kg |\n",
        f"---\nweight: 31 kg\n---\n# {name}\n",
        f"# {name}\nA dog. On the scales {name} shows 31 kg. It sleeps.\n",
    ]
    for text in texts:
        files = {**world.files, path: text}
        said = {s for s in parse(files, "pets").statements if s.note == path}
        assert said == {Statement(path, path, "weight", "31")}, text
    wrong = parse({**world.files, path: f"# {name}\n- weight: heavy\n- vet: Rex\n"}, "pets").statements
    assert {Statement(path, path, "weight", "?heavy"), Statement(path, path, "pet>vet", "?Rex")} <= set(wrong)
    for line in ("- mood: 31", "On the scales Nobody shows 31 kg."):
        stray = parse({**world.files, path: f"# {name}\n{line}\n"}, "pets")
        assert not [s for s in stray.statements if s.note == path]
