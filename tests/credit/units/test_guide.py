"""The worked example of docs/concepts/units.md prints what the page shows."""

import re
from pathlib import Path

import numpy as np

from posttrain.credit.units.offsets import align
from posttrain.credit.units.segment import Answer, segment
from posttrain.recipe.units import StepUnits
from posttrain_environments.rationales.dataset import samples
from posttrain_environments.rationales.procedures import write

GUIDE = (Path(__file__).parents[3] / "docs" / "concepts" / "units.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_shows(capsys, monkeypatch, smollm):
    monkeypatch.setattr("posttrain.models.load.load_tokenizer", lambda recipe: smollm)  # loaded once is enough
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.M | re.S)
    code, shown = (block for language, block in blocks if language in ("python", ""))
    exec(compile(code, "docs/concepts/units.md", "exec"), {})
    assert capsys.readouterr().out == shown
    assert shown.count("step ") == 4


def test_the_steps_of_any_procedure_are_its_lines(smollm):
    recipe, seen = StepUnits(type="steps", closing="^Rationale:"), 0
    for _, sample in samples(0, {"test": 40, "val": 0, "train": 0}):
        for procedure in (sample.procedure, *(corruption.procedure for corruption in sample.corruptions)):
            *lines, rationale = write(procedure).splitlines()
            ids = np.array([*smollm.encode("\n".join([*lines, rationale])), smollm.eos_token_id])
            units = segment(recipe, [Answer(ids, ended=True)], smollm.decode)
            text = align(ids, smollm.decode)
            parts = [text.slice(*span).strip() for span in units]
            assert parts == [*lines, f"{rationale}{smollm.eos_token}"]
            assert units.is_unit.tolist() == [True] * len(lines) + [False]
            seen += 1
    assert seen == 120
