"""A loss of a user, written and registered in this file alone: its key, metric, figure and documentation follow."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

import posttrain
from posttrain.cli.main import main
from posttrain.figures.plots import figures
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.loss import LOSSES
from posttrain.recipe.metrics import Metric, Panel
from posttrain.recipe.needs import needs
from posttrain.recipe.study import trained_metrics
from posttrain.recipe.warnings import recipe_warnings
from posttrain.runs.metrics import read_metrics
from posttrain.runs.panels import declared_panels, panels_of
from tests.docs.test_site import module

LETTERS = Path(__file__).parents[1] / "training" / "letters.py"
HELD = Metric(
    "policy/toy_held",
    "tokens that the toy loss holds",
    Panel("Toy loss", "share of tokens", percent=True, figure="optimization"),
)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(LOSSES, "_kinds", {name: LOSSES.find(name) for name in LOSSES.names()})

    @posttrain.register_loss("toy", metrics=(HELD,))
    def toy(
        logprobs,
        batch,
        *,
        hold: Annotated[float, Field(gt=0, description="Ratio above which a token is held.")] = 2.0,
        slope: Annotated[float, Field(description="Weight of held tokens."), needs("aggregation", "constant")] = 0.0,
    ):
        """Policy gradient without tokens whose ratio is large."""
        held = (logprobs.detach() - batch.rollout_logprobs).exp() > hold
        losses = -(batch.advantages * logprobs).masked_fill(held, 0.0)
        return losses, {"policy/toy_held": (float(held.sum()), len(held))}


def test_a_dry_run_reads_its_keys(toy, tiny_model, tmp_path, capsys):
    words = ["rl", "environment.type=bandit", f"model.path={tiny_model}", f"runs={tmp_path}", "loss.type=toy"]
    assert main([*words, "loss.hold=1.5", "--dry-run"]) == 0
    assert main([*words, "loss.hold=0", "--dry-run"]) == 2
    assert "loss.hold is 0; it must be a number above 0" in capsys.readouterr().err
    (warning,) = [w for w in recipe_warnings(load_recipe([], ["loss.type=toy", "loss.slope=2"], "rl")) if "slope" in w]
    assert warning.startswith("loss.slope has no effect: loss.aggregation is token_mean; remove it, or set")


def test_it_is_documented(toy, capsys):
    assert main(["recipe", "loss"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "`toy`: Policy gradient without tokens whose ratio is large." in shown
    assert "Ratio above which a token is held." in shown
    page = module("theme/hooks.py").markdown_of_metrics()
    assert "| `policy/toy_held` | Toy loss: tokens that the toy loss holds, share of tokens |" in page
    assert HELD in trained_metrics("rl")


def test_its_metric_is_written_and_drawn(toy, tiny_model, tmp_path):
    result = posttrain.rl(
        name="toy",
        runs=str(tmp_path),
        steps=2,
        model={"path": str(tiny_model), "threads": 1},
        environment={"type": str(LETTERS), "max_turns": 2},
        loss={"type": "toy", "hold": 0.5},  # holds every token of an update on policy
        rollout={"groups_per_step": 2, "episodes_per_group": 4, "tokens_per_turn": 8},
        evaluation={"every": 0, "final_seeds": {"start": 2_000_000, "count": 2}},
    )
    assert [line["policy/toy_held"] for line in result.metrics] == [1.0, 1.0]
    assert [line["optimizer/gradient_norm"] for line in result.metrics] == [0.0, 0.0]
    lines = read_metrics(result.run / "metrics.jsonl")
    (panel,) = [panel for panel in panels_of("optimization", lines) if panel.title == "Toy loss"]
    assert [curve.label for curve in panel.curves] == ["tokens that the toy loss holds"]
    figure = dict(figures("toy", lines))["optimization"]
    assert any("Toy loss" in axes.get_title(loc="left") for axes in figure.axes)


def test_it_is_gone_with_its_registration():
    assert "Toy loss" not in {panel.title for panel in declared_panels()["optimization"]}
