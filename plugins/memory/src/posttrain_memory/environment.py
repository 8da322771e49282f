"""The memory agent's environment: a question, a vault of Markdown notes, and Python code that reads and changes it."""

import atexit
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from posttrain.data.held_out import TaskRow
from posttrain.environments.game import Rejected, play, require
from posttrain.environments.judge import check_judge, require_judge
from posttrain.environments.protocol import Baseline, Environment, Message, Observation, Step
from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe
from posttrain_memory.baselines import ASKED_AFTER, BASELINE_POLICIES, NOTES, Outcome, measure_baselines, summary
from posttrain_memory.interpreter.pool import Interpreter, InterpreterLimits
from posttrain_memory.interpreter.session import ToolSession
from posttrain_memory.judging import judge_episode
from posttrain_memory.parser import Reply, parse
from posttrain_memory.privacy.facts import facts_of
from posttrain_memory.prompts import first_messages, refusal, system_prompt
from posttrain_memory.recipe import MemoryRecipe
from posttrain_memory.task_source import Assignment, generated_task, task_table
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.text import split_question
from posttrain_memory.vault.vault import Vault
from posttrain_memory.worlds.replies import asks
from posttrain_memory.worlds.rewards import Scored, score
from posttrain_memory.worlds.task import KINDS
from posttrain_memory.worlds.updates import is_forgotten

JUDGE = "judge"
"""Key of the judge's score. With a follow-up it is the mean of both halves."""
_NOTHING = "Nothing comes to mind."
"""A wrong reply used by `validate`."""


class Memory(Environment):
    """Answer a user's question from notes, or change the notes, by writing Python.

    An episode succeeds if the task is solved completely. Each episode gets its own copy of the vault. The `info` of
    each step has `kind`; that of the last step adds `success`, `scores` (success by kind of task), `parts` (of the
    reward) and `faults` (in words). With `follow_up`, an update is followed by a new conversation about the changed
    notes, and each half contributes half of the reward. With a judge, `judge` holds its verdict.

    A failure of the interpreter or the judge is raised, because it says nothing about the policy.
    """

    Recipe = MemoryRecipe
    scripted_baselines = tuple(name for name in BASELINE_POLICIES if name != "random")
    score_order = (*KINDS, NOTES, ASKED_AFTER, JUDGE)

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        super().__init__(recipe)
        self.primer = "<think>" if self.recipe.opened_by == "environment" else ""
        self._assignment: Assignment | None = None
        self._judge = self.recipe.judge
        if self._judge is not None:
            check_judge(self._judge)
            self.blocking = True

    @classmethod
    def _without_judge(cls, recipe: MemoryRecipe) -> "Memory":
        """An environment that does not call the judge."""
        environment = cls(recipe)
        environment._judge = None
        return environment

    def reset(self, seed: int) -> Observation:
        """Load the vault of `seed` and ask its question."""
        given = assignment(self.recipe, seed)
        self._kind = given.task.kind
        asked_after = self.recipe.follow_up or "asked_after" in given.task.truth
        self._share = 0.5 if asked_after and given.task.follow_up is not None else 1.0
        """Share of the reward that each conversation of the episode contributes."""
        self._updated: Scored | None = None
        """The score of the update, while its follow-up is under way."""
        self._judged: list[float] = []
        self._grounded = True
        """Whether the notes lack what the update should have removed, while its follow-up is under way."""
        self._vault = Vault(MemoryStorage(given.files), self.recipe.vault)
        return Observation(self._start_conversation(given))

    def _start_conversation(self, given: Assignment) -> list[Message]:
        """Start a conversation about the current vault; returns its first messages."""
        self._assignment = given
        self._turns = self._blocks = 0
        task = given.task
        question, rules = split_question(task.question)
        self._session = ToolSession(
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
        """Run the code of a message, or score its reply. A message that cannot be parsed has no effect."""
        self._current()
        self._turns += 1
        left = self.recipe.max_turns - self._turns
        parsed = parse(action, self.recipe.thinking)
        info: dict[str, Any] = {"kind": self._kind}
        if isinstance(parsed, Reply):
            return self._finish(parsed.text, info, 0.0)
        reward, messages = 0.0, []
        if isinstance(parsed, Rejected):
            info["rejected"] = parsed.reason
            reward = self.recipe.rejected
            messages = [refusal(parsed.reason, left)]
        elif left:
            reward = self._share * self.recipe.weights.code_reward(self._blocks)
            self._blocks += 1
            messages = [self._session.run(parsed.code, left)]
        if not left:
            return self._finish(None, info, reward)
        return Step(messages, reward, terminated=False, truncated=False, info=info)

    def _finish(self, reply: str | None, info: dict[str, Any], reward: float) -> Step:
        """The last step. The policy's own words are scored, before redaction, so that guessing costs reward."""
        task, before, after = self._current().task, self._current().files, self._vault.files()
        verdict = None
        if self._judge is not None:
            verdict = judge_episode(self._judge, task, before, after, reply)
            info["judge"] = {"score": verdict.score, "reason": verdict.reason}
            self._judged.append(verdict.score)
        judged, checked_first = verdict.score if verdict else None, self._session.checked_first
        asked, weights = asks(reply or ""), self.recipe.weights
        scored = score(task, before, after, reply, asked, self._turns, weights, checked_first, judged, self._grounded)
        info |= {"parts": dict(scored.parts), "faults": list(scored.faults), "variant": task.variant, "hops": task.hops}
        if reply is not None and self._session.filter.clean(reply) != reply:
            info["withheld"] = True
        if self._share < 1 and task.follow_up is not None:
            self._updated, self._grounded = scored, is_forgotten(task, after)
            messages = self._start_conversation(Assignment(task.follow_up, after))
            return Step(messages, reward + self._share * scored.total, False, False, info, new_conversation=True)
        self._assignment = None
        success, halves = scored.success, {}
        if self._updated is not None:
            success = self._updated.success and scored.success
            halves = {NOTES: float(self._updated.success), ASKED_AFTER: float(scored.success)}
        verdicts = {JUDGE: sum(self._judged) / len(self._judged)} if self._judged else {}
        info |= {"success": success, "scores": {self._kind: float(success), **halves, **verdicts}}
        return Step([], reward + self._share * scored.total, reply is not None, reply is None, info)

    def expert(self) -> str:
        """The next message of the scripted solution: code, or finally the reply."""
        task = self._current().task
        if not task.scripted:
            raise NotImplementedError(f"there is no scripted solution for {task.question[:60]!r}")
        place = min(self._turns, len(task.code))
        thought = _thought(task.kind, task.asks, place, len(task.code))
        if place < len(task.code):
            return self._message(thought, f"<python>\n{task.code[place]}\n</python>")
        return self._message(thought, f"<reply>{task.reply}</reply>")

    def random_answer(self, draw: float) -> str:
        """A reply with one fact of the vault, chosen by `draw` in [0, 1)."""
        files = self._current().files
        facts = [fact for fact in facts_of(files, self._current().task.theme) if fact.kind != "link"]
        fact = facts[min(int(draw * len(facts)), len(facts) - 1)]
        value = files[fact.note][fact.value_start : fact.value_end]
        return self._message("I guess.", f"<reply>It is {value}.</reply>")

    @classmethod
    def task_rows(cls, recipe: MemoryRecipe) -> Sequence[TaskRow] | None:
        """The rows of `tasks`; None if tasks are generated."""
        return task_table(recipe).tasks if recipe.tasks else None

    @classmethod
    def check_tasks(cls, recipe: MemoryRecipe, training: Sequence[int], held_out: Sequence[Sequence[int]]) -> list[str]:
        """Warnings about skipped rows and about vaults that are both trained on and held out."""
        if recipe.judge is not None:
            require_judge(recipe.judge)
        if not recipe.tasks:
            return []
        table = task_table(recipe)
        trained = {str(table.rows[seed].files) for seed in training}
        known = sum(str(table.rows[seed].files) in trained for seeds in held_out for seed in seeds)
        lines = table.problems.summary()
        if table.renamed:
            lines.append(
                f"{len(table.renamed)} notes renamed, because a vault refuses their names; first: {table.renamed[0]}"
            )
        if known:
            lines.append(f"{known} of the held-out tasks are asked in worlds that are also trained on; move them apart")
        return lines

    @classmethod
    def task_name(cls, recipe: MemoryRecipe, seed: int) -> str:
        """The kind of the task and its seed."""
        return f"{assignment(recipe, seed).task.variant} task of environment seed {seed}"

    @classmethod
    def baselines(cls, recipe: MemoryRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """Success of the policies in `baselines.py`, and of the scripted solution (`optimal`).

        The judge is not called. There is no `optimal` if a task has no scripted solution.
        """
        given = [assignment(recipe, seed) for seed in seeds]
        players = measure_baselines(recipe, given)
        if not all(one.task.scripted for one in given):
            return players
        solved = []
        for seed in seeds:
            steps = play(cls._without_judge(recipe), seed)
            last = steps[-1].info
            scores = last["scores"]
            halves = (scores[NOTES] == 1, scores[ASKED_AFTER] == 1) if NOTES in scores else None
            solved.append(Outcome(last["kind"], last["success"], sum(step.reward for step in steps), halves))
        return {**players, "optimal": summary(solved)}

    @classmethod
    def validate(cls, recipe: MemoryRecipe, seeds: Sequence[int]) -> None:
        """Check that the scripted solution succeeds with full reward, also after the same instance has changed its
        vault, and that a wrong reply, no reply and unparsable messages fail and earn less.

        Seeds beyond the last row are skipped; raises InputError if none is left. The judge is not called: for tasks
        that only it can score, only two resets are compared.
        """
        environment, weights = cls._without_judge(recipe), recipe.weights
        if recipe.tasks:
            count = len(task_table(recipe).rows)
            seeds = [seed for seed in seeds if seed < count] or seeds[:1]
        for seed in seeds:
            require(environment.reset(seed) == environment.reset(seed), seed, "two resets differ")
            if not environment._current().task.scripted:
                continue
            best = play(environment, seed)
            faults = ", ".join(best[-1].info["faults"])
            require(best[-1].info["success"] is True, seed, f"the scripted solution does not succeed: {faults}")
            earned = sum(step.reward for step in best)
            require(earned >= weights.success - weights.turns_at_most - 1e-9, seed, f"it earned {earned:g} only")
            require(play(environment, seed) == best, seed, "the same messages led to something else")
            code = environment._message("", "<python>\na = 1\n</python>")
            wrong = environment._message("", f"<reply>{_NOTHING}</reply>")
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

    def _message(self, thought: str, block: str) -> str:
        """A message in the recipe's format; without `<think>` if the chat template writes it."""
        if not self.recipe.thinking:
            return block
        opening = "" if self.recipe.opened_by == "template" else "<think>"
        return f"{opening}{thought}</think>{block}"

    def _current(self) -> Assignment:
        if self._assignment is None:
            raise RuntimeError("the episode is over; call reset")
        return self._assignment


def assignment(recipe: MemoryRecipe, seed: int) -> Assignment:
    """The task and the vault of `seed`. Raises InputError for a seed beyond the last row."""
    if not recipe.tasks:
        return generated_task(recipe.worlds, seed)
    rows = task_table(recipe).rows
    if not 0 <= seed < len(rows):
        raise InputError(
            f"environment seed {seed} is beyond environment.tasks, which has {len(rows)} tasks (0 to {len(rows) - 1}); "
            "change `seeds` or `evaluation.seeds`"
        )
    return rows[seed]


def _thought(kind: str, asks_back: bool, place: int, blocks: int) -> str:
    """A one-line thought for a step of a scripted solution."""
    if place < blocks:
        last = kind == "update" and place == blocks - 1
        then = "Now I change the notes." if last else "That leads on to the next note."
        return then if place else "I look at the notes first."
    if asks_back:
        return "The notes do not settle this, so I ask."
    ends = {"update": "The notes are changed.", "filter": "I tell what the privacy rule allows."}
    return ends.get(kind, "The notes say it.")


@lru_cache(maxsize=4)
def _interpreter(limits: str, workers: int) -> Interpreter:
    """The interpreter shared by all episodes with these limits; closed at exit."""
    interpreter = Interpreter(InterpreterLimits.model_validate_json(limits), workers)
    atexit.register(interpreter.close)
    return interpreter
