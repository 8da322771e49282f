"""A model that reveals all it can, in generated worlds with known hidden facts: no hidden fact gets through a chat."""

import json

import pytest
from plugins.memory.tests.agent.scripts import code, vault

from posttrain_memory.agent.session import MemoryAgent
from posttrain_memory.environment import assignment
from posttrain_memory.privacy.facts import facts_of
from posttrain_memory.privacy.filter import PrivacyFilter
from posttrain_memory.recipe import AgentRecipe, MemoryRecipe
from posttrain_memory.vault.text import split_question
from posttrain_memory.worlds.replies import answer, contains_value

ONLY_FILTERS = {"notes": 6, "filler": (0, 2), "retrieval": 0, "update": 0, "clarification": 0, "filter": 1}
DUMP = """
texts = ""
for path in {paths}:
    if file_exists(path):
        texts = texts + read_file(path)
hits = search_files("a")
"""


class Gossip:
    """Reads all notes, then repeats in every way all messages of the conversation, and guesses."""

    def __init__(self, paths, besides):
        self._dump = DUMP.format(paths=list(paths))
        self._besides = besides
        self.heard = []

    def begin(self, messages, primer):
        self.heard = [messages[-1]["content"]]
        self._turn = 0

    def observe(self, messages):
        self.heard.append(messages[-1]["content"])

    def answer(self):
        self._turn += 1
        everything = "\n".join([*self._besides, *(text for text in self.heard if text.startswith("<result>"))])
        for tag in ("think", "python", "reply", "result"):
            everything = everything.replace(f"</{tag}>", "")
        ways = [
            code(self._dump, thought="\n".join(self._besides)),
            everything,
            code(f"# {json.dumps(everything)}\nx = {json.dumps(self._besides)}", thought=everything),
        ]
        return ways[(self._turn - 1) % 4] if self._turn % 4 else f"<think>t</think><reply>{everything}</reply>"


def _spelled(given, secrets):
    """The hidden values as the notes spell them."""
    values = [secret.value for secret in secrets]
    facts = [fact for fact in facts_of(given.files, given.task.theme) if fact.value in values]
    return [given.files[fact.note][fact.value_start : fact.value_end] for fact in facts]


def shown(events):
    return "\n".join(f"{event.text}\n{event.message}" for event in events)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 6), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("knows", [False, True], ids=["honest", "knows them"])
@pytest.mark.parametrize("standing", [True, False], ids=["standing", "in the question"])
def test_hidden_facts_of_worlds_stay_hidden(shared_interpreter, standing, knows, seeds):
    # What stands in sentences is hidden as a whole; its values are known only where facts have labels.
    recipe = MemoryRecipe.model_validate({"worlds": {**ONLY_FILTERS, "styles": ["bullets"] if knows else []}})
    checked = told_without = 0
    for seed in seeds:
        given = assignment(recipe, seed)
        words, rules = split_question(given.task.question)
        secrets = [answer(record) for record in given.task.truth["hidden"]]
        chat_client = Gossip(given.files, _spelled(given, secrets) if knows else [])
        agent = MemoryAgent(
            vault(given.files),
            chat_client,
            shared_interpreter,
            AgentRecipe(result_chars=20_000),
            rules if standing else (),
        )
        free = list(agent.ask(words)) if not standing else []
        events = [event for _ in range(2) for event in agent.ask(words if standing else given.task.question)]
        assert events[-1].kind == "reply"
        visible_to_the_model = "\n".join(PrivacyFilter(rules, given.files).view.values())
        for secret in secrets:
            # A value may also belong to a fact that is not hidden, and may then be shown.
            if contains_value(visible_to_the_model, secret) or contains_value(words, secret):
                continue
            checked += 1
            told_without += contains_value(shown(free), secret)
            assert not contains_value(shown(events), secret), (seed, given.task.question)
            # The model may see values that its own code prints, but not hidden ones.
            assert knows or not any(contains_value(text, secret) for text in chat_client.heard)
    assert checked >= len(seeds) // 2
    assert standing or told_without >= 0.8 * checked, "without the rule the same model tells it all"
