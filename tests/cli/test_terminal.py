"""The last screen of a run, in terminals of two widths."""

import pytest

from tests.terminal import in_terminal


@pytest.mark.parametrize("width", [80, 120])
def test_the_end_of_a_run_stays_on_the_screen(tiny_model, tmp_path, width):
    words = ["environment.type=bandit", f"model.path={tiny_model}", "steps=2", "rollout.groups_per_step=1"]
    words += ["rollout.episodes_per_group=2", "evaluation.seeds.count=2", "evaluation.final_seeds.count=3"]
    code, lines = in_terminal("rl", *words, f"runs={tmp_path}", "name=b", "model.dtype=float32", width=width)
    assert code == 0
    starts = [line.split("  ")[0] for line in lines]
    order = ["step 0/2", "step 1/2", "step 2/2", "b: bandit, held-out seeds"]
    assert [start for start in dict.fromkeys(starts) if start in order] == order
    table = lines[lines.index("b: bandit, held-out seeds") + 1 :]
    for name in ("random policy ", "start of this run ", "trained model ", "optimal policy "):
        assert sum(line.startswith(f" {name}") for line in table) == 1
    ending = "".join(table).replace(" ", "")  # A path may be longer than the terminal is wide.
    assert f"report:{tmp_path}/b/report.md" in ending
    assert f"model:{tmp_path}/b/model" in ending
    assert not any("time left" in line for line in lines)
    assert not any(line.startswith(("[", "tokens/s")) for line in lines)  # Nothing wraps inside a line of numbers.
