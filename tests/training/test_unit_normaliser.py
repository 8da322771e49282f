"""`posttrain fit-normalizer` on a run: its files, output and errors."""

import json

import pytest

from posttrain.cli.main import main
from posttrain.credit.units.normalizer import read_normalizers
from tests.training import small
from tests.training.preferences import pair_rows, recipe_values, write_jsonl


@pytest.fixture(scope="module")
def of_units(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("units")
    return small.train(recipe_values("reward", tiny_model, folder, epochs=1, units={"segmenter": {"type": "token"}}))[
        0
    ].path


def test_a_fit_writes_params_profile_and_plot(of_units, tmp_path, capsys):
    assert main(["fit-normalizer", str(of_units)]) == 0
    assert "R²" in capsys.readouterr().out
    more = write_jsonl(tmp_path / "more.jsonl", pair_rows(40, 50))
    assert main(["fit-normalizer", str(of_units), "--data", more]) == 0
    fits = read_normalizers(of_units / "normalizer" / "params.json")
    assert list(fits) == [("small", name, "token", "avg", "0") for name in ("validation", "more")]
    printed = capsys.readouterr().out
    made = list(fits.values())[1]
    assert f"mean(p)  = {made.slope_mean:+.4f} log p {made.intercept_mean:+.4f}" in printed
    details = json.loads((of_units / "normalizer" / "more.json").read_text())
    assert details["count"]["1.000"] == 80
    assert details["mean"].keys() == details["std"].keys() == details["count"].keys()
    assert (of_units / "plots" / "normalizer.png").read_bytes().startswith(b"\x89PNG")


def test_runs_without_units_and_files_without_pairs_are_refused(of_units, tiny_model, tmp_path, capsys):
    plain = small.train(recipe_values("reward", tiny_model, tmp_path, epochs=1))[0].path
    assert main(["fit-normalizer", str(plain)]) == 2
    assert "train a model with `units`" in capsys.readouterr().err
    assert main(["fit-normalizer", str(of_units), "--data", str(tmp_path / "gone.jsonl")]) == 2
    assert main(["fit-normalizer", str(tmp_path / "gone")]) == 2
