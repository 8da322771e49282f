"""The result of a run, read from its directory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import InputError, NothingLearned
from posttrain.images import readable
from posttrain.plugins import require_module
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import read_metrics
from posttrain.runs.tables import IMPROVED, Verdict, read_verdict

if TYPE_CHECKING:
    import pandas

    from posttrain.episode import Episode
    from posttrain.rollout.store import Split

_OF_THE_LOG = ("step", "kind", "time/run", "nonfinite")


@dataclass(frozen=True)
class Result:
    """The result of one run of a stage. `Result.open` reads it from a run directory.

    Stage functions such as `posttrain.rl` return a `Result`.
    """

    run: Path
    """The run directory."""
    stage: str
    """`sft`, `reward`, `dpo`, `rl`, `evaluate` or `generate`."""
    model: Path | None
    """Directory of the exported model, which loads with transformers; None for stages that do not train."""
    metrics: list[dict[str, Any]]
    """One row per training step: `step`, and values by name."""
    evaluations: list[dict[str, Any]]
    """One row per evaluation of the learning curve: `step`, and values by name."""
    evaluation: list[dict[str, Any]]
    """One row per policy of the final table: `policy`, values by name with the limits of their 95% intervals
    (`success`, `success_low`, `success_high`), and `n`, the environment seeds or rows they were measured on."""
    best_step: int | None
    """The step whose weights were exported; None if no checkpoint was chosen."""
    verdict: Verdict | None
    """Whether training changed the held-out measure beyond chance: its `outcome` is `improved`, `nothing was learned`,
    `got worse`, or `not shown` on too few tasks. None if the model was not measured before training, or is not trained."""
    warnings: list[str]
    """The warnings of the run."""

    @classmethod
    def open(cls, path: str | Path) -> "Result":
        """The result of the run in the directory `path`, finished or not. InputError if there is no run."""
        run = RunDirectory.open(path)
        lines = read_metrics(run.metrics)
        of = {kind: [line for line in lines if line["kind"] == kind] for kind in {line["kind"] for line in lines}}
        final = of.get("final", [])
        about_the_run = {*_OF_THE_LOG, "step", "policy", "best_step", "chosen"}
        measured = [line for line in final if line.keys() - about_the_run]
        model = run.path / "model"
        return cls(
            run=run.path,
            stage=run.load_recipe().stage,
            model=model if model.is_dir() else None,
            metrics=[_row(line) for line in of.get("train", [])],
            evaluations=[_row(line) for line in of.get("evaluation", [])],
            evaluation=[_row(line, step=False) for line in [*of.get("baseline", []), *measured]],
            best_step=next((line["best_step"] for line in final if "best_step" in line), None),
            verdict=read_verdict(run.path),
            warnings=[line["message"] for line in of.get("warning", []) if "message" in line],
        )

    def require_learning(self) -> None:
        """NothingLearned unless the held-out measure improved. InputError for a run that did not measure it before training."""
        if self.verdict is None:
            raise InputError(
                f"{self.run} has no verdict, because it did not measure the model before training; set evaluation.every above "
                "0 and evaluation.start to true, and hold out data"
            )
        if self.verdict.outcome != IMPROVED:
            raise NothingLearned(f"{self.run}: {self.verdict.sentence}")

    def metrics_table(self) -> "pandas.DataFrame":
        """`metrics` as a pandas table with `step` as its index. InputError if pandas is not installed."""
        return (
            require_module("pandas", "a table")
            .DataFrame(self.metrics, columns=None if self.metrics else ["step"])
            .set_index("step")
        )

    def episodes(self, step: int | None = None, split: "Split" = "train") -> "list[Episode]":
        """The stored episodes of a step, or of all steps: `train`, `evaluation` (learning curve) or `final`."""
        return [episode for _, episode in self._episodes(step, split)]

    def episodes_table(self, step: int | None = None, split: "Split" = "train") -> "pandas.DataFrame":
        """The stored episodes as a pandas table, one row per episode. InputError if pandas is not installed.

        Columns: `step`, `seed`, `group`, `index`, `turns`, `tokens` (sampled), `return`, `success`, `outcome`, `prompt`
        (the first user message), `answer` (of the last turn), and the scores that the environment reports.
        """
        rows = []
        for at, episode in self._episodes(step, split):
            last = episode.turns[-1] if episode.turns else None
            asked = [message["content"] for message in episode.messages if message["role"] == "user"]
            row = {
                "step": at,
                **{key: getattr(episode, key) for key in ("seed", "group", "index")},
                "turns": len(episode.turns),
                "tokens": episode.sampled_tokens,
                "return": episode.total_reward if episode.has_return else None,
                "success": episode.success,
                "outcome": str(episode.outcome),
                "prompt": readable(asked[0]) if asked else "",
                "answer": last.answer if last else "",
            }
            rows.append(row | (last.info.get("scores", {}) if last else {}))
        return require_module("pandas", "a table").DataFrame(rows)

    def _episodes(self, step: int | None, split: "Split") -> "Iterator[tuple[int, Episode]]":
        from posttrain.rollout.store import read_episodes, stored_steps

        for stored in stored_steps(self.run / "episodes"):
            if stored.split == split and step in (None, stored.step):
                for episode in read_episodes(stored.path).episodes:
                    yield stored.step, episode


def _row(line: dict[str, Any], step: bool = True) -> dict[str, Any]:
    return ({"step": line["step"]} if step else {}) | {k: v for k, v in line.items() if k not in _OF_THE_LOG}
