"""A quick slice of the standing adversary: the same seeds each time. `make soak` uses new ones."""

import pytest

from tests.adversary.models import SERVERS
from tests.adversary.run_folders import KINDS, SECRET, check_commands, check_pages, make_runs
from tests.adversary.soak import soak
from tests.adversary.surfaces import SURFACES, attempt

CASES = {
    2: ("clock", "mcp", "architecture", "chat_template", "exported"),
    3: ("interpreter", "run_folder", "poisoned_episode", "connections", "commands"),
    4: ("agent_calls", "serve"),
    8: ("run_directory",),
    12: ("server", "model_directory"),
    25: ("requests", "wire", "resumed"),
    60: ("tool_calls",),
    80: ("disguise", "journal", "letter_case"),
    200: ("judged", "injection"),
}
"""Number of cases, about a second in all -> surfaces; 40 for others."""
COUNTS = {surface: count for count, surfaces in CASES.items() for surface in surfaces}
SLOW = {"kill": 3, "outage": 8, "killed": 20, "no_space": 20, "bombs": 40}
SLOW |= dict.fromkeys(("permission", "plugins", "audited", "places"), 12)
"""Surfaces that train models in other processes, or take long, and their numbers of cases."""
MORE = {"architecture": 12, "chat_template": 24, "exported": 20, "letter_case": 200}
"""Surfaces of which the quick tests have fewer cases, and their numbers."""


@pytest.fixture(scope="module", autouse=True)
def _no_server_is_left():
    """Close the servers of `connections` and `requests`: processes of `tests.forks` end without `atexit`."""
    yield
    SERVERS.close()


@pytest.mark.parametrize("surface", [one for one in SURFACES if one not in SLOW])
def test_seeded_attacks_do_not_get_through(surface, tmp_path):
    failed = [(seed, attempt(surface, seed, tmp_path / "case")) for seed in range(COUNTS.get(surface, 40))]
    assert [one for one in failed if one[1] is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_hostile_run_folder_gets_through_any_page_or_command(kind, tmp_path, monkeypatch):
    bad, outside = make_runs(tmp_path, kind, "bad")
    monkeypatch.chdir(tmp_path)
    check_pages(tmp_path)
    check_commands(tmp_path, bad)
    assert (outside / "secret").read_text() == f"{SECRET}\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("surface", SLOW | MORE)
def test_seeded_attacks_of_slow_surfaces_do_not_get_through(surface, tmp_path):
    failed = [(seed, attempt(surface, seed, tmp_path / "case")) for seed in range((SLOW | MORE)[surface])]
    assert [one for one in failed if one[1] is not None] == []


def test_the_obedient_judge_obeys_where_texts_are_not_sanitized(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.environments.untrusted.sanitize", lambda text: text)
    assert any(attempt("injection", seed, tmp_path / "case") for seed in range(20))


def test_a_soak_reports_cases_failures_and_seeds(tmp_path, monkeypatch, capsys):
    def fails(seed, folder):
        assert seed % 2, "even"

    monkeypatch.setitem(SURFACES, "judged", fails)
    failures = soak(0.5, 100, ["judged"], tmp_path)
    output = capsys.readouterr().out
    assert failures["judged"][0] == (100, "AssertionError: even assert (100 % 2)")
    assert "python -m tests.adversary.soak --surface judged --seed 100" in output
    assert "failures: seeds 100, 102, 104" in output
    assert "first seed 100" in output
