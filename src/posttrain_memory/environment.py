"""The memory agent's environment: a question, a vault of Markdown notes, and code that reads and changes it."""

import atexit
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from posttrain.environments.game import Rejected, play, require
from posttrain.environments.judge import check_judge
from posttrain.environments.protocol import Baseline, Environment, Message, Observation, Step, require_rows
from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe
from posttrain_memory.baselines import (
    ASKED_AFTER,
    NOTES,
    PLAYERS,
    Outcome,
    reference_players,
    summary,
)
from posttrain_memory.interpreter.pool import Interpreter, InterpreterLimits
from posttrain_memory.interpreter.session import Desk
from posttrain_memory.judging import judge_episode
from posttrain_memory.parser import Reply, parse
from posttrain_memory.privacy.facts import facts_of
from posttrain_memory.privacy.filter import split_question
from posttrain_memory.prompts import first_messages, last_call, refusal, system_prompt
from posttrain_memory.recipe import MemoryRecipe
from posttrain_memory.task_source import Assignment, generated_task, task_table
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.vault import Vault
from posttrain_memory.worlds.replies import asks
from posttrain_memory.worlds.rewards import Scored, score
from posttrain_memory.worlds.updates import forgotten

JUDGE = "judge"
"""What a judge gives, of an episode with a follow-up the mean of both halves."""
_NOTHING = "Nothing comes to mind."
"""What `validate` gives as a wrong reply."""


class Memory(Environment):
    """A user's question is answered from notes, or the notes are changed, by writing Python. Success is all of the task.

    Every episode has its own copy of its vault. `info` of each step has `kind`; of the last one `success`, `scores`
    (success by the kind of task), `parts` of the reward, and `faults` in words. With `follow_up`, an update is followed
    by a new conversation over the notes as they are then; each half pays half of the reward. With a judge, `judge` is
    its verdict on what ended. A fault of the interpreter or the judge is raised, for it says nothing about the policy.
    """

    Recipe = MemoryRecipe
    scripted_baselines = tuple(name for name in PLAYERS if name != "random")

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        super().__init__(recipe)
        self.primer = "<think>" if self.recipe.opened_by == "environment" else ""
        self._assignment: Assignment | None = None
        self._judge = self.recipe.judge
        if self._judge is not None:
            check_judge(self._judge)

    @classmethod
    def _unjudged(cls, recipe: MemoryRecipe) -> "Memory":
        """An environment that asks no judge."""
        environment = cls(recipe)
        environment._judge = None
        return environment

    def reset(self, seed: int) -> Observation:
        """Put the vault of `seed` in place and ask its question."""
        given = assignment(self.recipe, seed)
        self._kind = given.task.kind
        self._updated: Scored | None = None
        """What the update of an episode came to, while it is followed up."""
        self._judged: list[float] = []
        self._grounded = True
        """Whether the notes lack what the update took away, while it is followed up."""
        self._vault = Vault(MemoryStorage(given.files), self.recipe.vault)
        return Observation(self._begin(given))

    def _begin(self, given: Assignment) -> list[Message]:
        """A conversation about the vault as it is; its first messages."""
        self._assignment = given
        self._turns = 0
        task = given.task
        question, rules = split_question(task.question)
        self._desk = Desk(
            self._vault,
            _interpreter(self.recipe.interpreter.model_dump_json(), self.recipe.workers),
            rules,
            task.theme,
            self.recipe.tool_calls,
            self.recipe.result_chars,
        )
        system = system_prompt(self.recipe.max_turns, self.recipe.thinking, self.recipe.prompt)
        return first_messages(system, question, rules)

    def step(self, action: str) -> Step:
        """Run the code of a message, or score its reply. A message that is not understood does nothing."""
        self._current()
        self._turns += 1
        left = self.recipe.max_turns - self._turns
        found = parse(action, self.recipe.thinking)
        info: dict[str, Any] = {"kind": self._kind}
        if isinstance(found, Reply):
            return self._end(found.text, info, 0.0)
        reward, messages = 0.0, []
        if isinstance(found, Rejected):
            info["rejected"] = found.reason
            reward = self.recipe.rejected
            messages = [refusal(found.reason, left)]
        elif left:
            messages = [self._desk.run(found.code)]
            messages = [last_call(messages[0])] if left == 1 else messages
        if not left:
            return self._end(None, info, reward)
        return Step(messages, reward, terminated=False, truncated=False, info=info)

    def _end(self, reply: str | None, info: dict[str, Any], reward: float) -> Step:
        """The last step of a conversation. What the policy said itself is scored, so that a guess at what is hidden has
        its price.
        """
        task, before, after = self._current().task, self._current().files, self._vault.files()
        verdict = None
        if self._judge is not None:
            verdict = judge_episode(self._judge, task, before, after, reply)
            info["judge"] = {"score": verdict.score, "reason": verdict.reason}
            self._judged.append(verdict.score)
        scored = score(
            task,
            before,
            after,
            reply,
            asks(reply or ""),
            self._turns,
            self.recipe.weights,
            self._desk.checked_first,
            verdict.score if verdict else None,
            self._grounded,
        )
        info |= {"parts": dict(scored.parts), "faults": list(scored.faults), "variant": task.variant, "hops": task.hops}
        if reply is not None and self._desk.let_out(reply) != reply:
            info["withheld"] = True
        if self.recipe.follow_up and task.follow_up is not None:
            self._updated, self._grounded = scored, forgotten(task, after)
            messages = self._begin(Assignment(task.follow_up, after))
            return Step(
                messages, reward + scored.total / 2, terminated=False, truncated=False, info=info, new_conversation=True
            )
        self._assignment = None
        success, halves, paid = scored.success, {}, scored.total
        if self._updated is not None:
            success, paid = self._updated.success and scored.success, scored.total / 2
            halves = {NOTES: float(self._updated.success), ASKED_AFTER: float(scored.success)}
        judged = {JUDGE: sum(self._judged) / len(self._judged)} if self._judged else {}
        info |= {"success": success, "scores": {self._kind: float(success), **halves, **judged}}
        return Step([], reward + paid, reply is not None, reply is None, info)

    def expert(self) -> str:
        """The next message of the scripted solution: code, or at last the reply."""
        task = self._current().task
        if "judge" in task.truth:
            raise NotImplementedError(f"no program knows what {task.question[:60]!r} makes of the notes")
        place = min(self._turns, len(task.code))
        thought = _thought(task.kind, task.asks, place, len(task.code))
        if place < len(task.code):
            return self._written(thought, f"<python>\n{task.code[place]}\n</python>")
        return self._written(thought, f"<reply>{task.reply}</reply>")

    def random_answer(self, draw: float) -> str:
        """A reply that tells one of the facts of the vault, chosen by `draw`; it is right by chance only."""
        files = self._current().files
        facts = [fact for fact in facts_of(files, self._current().task.theme) if fact.kind != "link"]
        fact = facts[min(int(draw * len(facts)), len(facts) - 1)]
        said = files[fact.note][fact.value_start : fact.value_end]
        return self._written("I guess.", f"<reply>It is {said}.</reply>")

    @classmethod
    def check_tasks(cls, recipe: EnvironmentRecipe, training: range, held_out: Sequence[range]) -> list[str]:
        """Rows that are left out, and vaults that are both trained on and held out; InputError beyond the last row."""
        assert isinstance(recipe, MemoryRecipe)
        if not recipe.tasks:
            return []
        table = task_table(recipe.tasks, recipe.memories, recipe.judge is not None)
        require_rows("environment.tasks", len(table.rows), training, held_out)
        trained = {str(table.rows[seed].files) for seed in training}
        known = sum(str(table.rows[seed].files) in trained for seeds in held_out for seed in seeds)
        shared = f"{known} of the held-out tasks are asked in worlds that are also trained on; move them apart"
        return [*table.problems.summary(), *([shared] if known else [])]

    @classmethod
    def task_name(cls, recipe: EnvironmentRecipe, seed: int) -> str:
        """The kind of the task, and its seed."""
        assert isinstance(recipe, MemoryRecipe)
        return f"{assignment(recipe, seed).task.variant} task of environment seed {seed}"

    @classmethod
    def baselines(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """`random` tells a random fact and `optimal` is the scripted solution; the players of `baselines.py`.

        No judge is asked; where it alone knows the truth of a task, there is no `optimal`.
        """
        assert isinstance(recipe, MemoryRecipe)
        given = [assignment(recipe, seed) for seed in seeds]
        players = reference_players(recipe, given)
        if any("judge" in one.task.truth for one in given):
            return players
        solved = []
        for seed in seeds:
            steps = play(cls._unjudged(recipe), seed)
            last = steps[-1].info
            scores = last["scores"]
            halves = (scores[NOTES] == 1, scores[ASKED_AFTER] == 1) if NOTES in scores else None
            solved.append(Outcome(last["kind"], last["success"], sum(step.reward for step in steps), halves))
        return {**players, "optimal": summary(solved)}

    @classmethod
    def validate(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> None:
        """The scripted solution succeeds and earns what success is worth, also where the same instance has changed
        its vault before; a wrong reply, no reply and messages that are not understood do not, and earn less.

        Seeds beyond the last row are left out; InputError where that leaves none. No judge is asked, so of a task whose
        truth it alone knows only the two resets are compared.
        """
        assert isinstance(recipe, MemoryRecipe)
        environment, weights = cls._unjudged(recipe), recipe.weights
        if recipe.tasks:
            count = len(task_table(recipe.tasks, recipe.memories, recipe.judge is not None).rows)
            seeds = [seed for seed in seeds if seed < count] or seeds[:1]
        for seed in seeds:
            require(environment.reset(seed) == environment.reset(seed), seed, "two resets differ")
            if "judge" in environment._current().task.truth:
                continue
            best = play(environment, seed)
            faults = ", ".join(best[-1].info["faults"])
            require(best[-1].info["success"] is True, seed, f"the scripted solution does not succeed: {faults}")
            earned = sum(step.reward for step in best)
            require(earned >= weights.success - weights.turns_at_most - 1e-9, seed, f"it earned {earned:g} only")
            require(play(environment, seed) == best, seed, "the same messages led to something else")
            code = environment._written("", "<python>\na = 1\n</python>")
            wrong = environment._written("", f"<reply>{_NOTHING}</reply>")
            for name, messages in (
                ("a wrong reply", [wrong] * 2),
                ("no reply", [code] * 2 * recipe.max_turns),
                ("messages that are not understood", ["nonsense"] * 2 * recipe.max_turns),
            ):
                steps = play(environment, seed, messages)
                last = steps[-1]
                require(last.terminated or last.truncated, seed, f"{name} did not end the episode")
                require(last.info["success"] is False, seed, f"{name} counts as success")
                require(sum(step.reward for step in steps) < earned, seed, f"{name} earned as much as the solution")
            require(all(step.info.get("rejected") for step in steps), seed, "nonsense was not rejected")
            try:
                environment.step(wrong)
            except RuntimeError:
                continue
            raise AssertionError(f"seed {seed}: a step was taken after the end")

    def _written(self, thought: str, block: str) -> str:
        """A message in the format of the recipe; without `<think>` where the template has written it."""
        if not self.recipe.thinking:
            return block
        opening = "" if self.recipe.opened_by == "template" else "<think>"
        return f"{opening}{thought}</think>{block}"

    def _current(self) -> Assignment:
        if self._assignment is None:
            raise RuntimeError("the episode is over; call reset")
        return self._assignment


def assignment(recipe: MemoryRecipe, seed: int) -> Assignment:
    """The task and the vault of `seed`; InputError for a seed beyond the last row."""
    if not recipe.tasks:
        return generated_task(recipe.worlds, seed)
    rows = task_table(recipe.tasks, recipe.memories, recipe.judge is not None).rows
    if not 0 <= seed < len(rows):
        raise InputError(
            f"environment seed {seed} is no row of environment.tasks, which has {len(rows)} tasks (0 to {len(rows) - 1}); "
            "change `seeds` or `evaluation.seeds`"
        )
    return rows[seed]


def _thought(kind: str, asks_back: bool, place: int, blocks: int) -> str:
    """A reason in one line for a step of a scripted solution."""
    if place < blocks:
        if place == 0:
            return "I look at the notes first."
        if kind == "update" and place == blocks - 1:
            return "Now I change the notes."
        return "That leads on to the next note."
    if asks_back:
        return "The notes do not settle this, so I ask."
    return {
        "update": "The notes are changed.",
        "filter": "I tell what the privacy rule allows.",
    }.get(kind, "The notes say it.")


@lru_cache(maxsize=4)
def _interpreter(limits: str, workers: int) -> Interpreter:
    """The interpreter that all episodes of these limits share; it ends with the program."""
    interpreter = Interpreter(InterpreterLimits.model_validate_json(limits), workers)
    atexit.register(interpreter.close)
    return interpreter
