"""Every page against WCAG AA by axe, at 400 pixels and wide, light and dark; and the keyboard. In a real browser."""

import shutil

import numpy as np
import pytest

from posttrain.credit.units.mixing import UnitRewards
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.samples import RowAnswer, RowSample, write_samples
from tests.rollout.episodes import played
from tests.runs.comparing import make_run
from tests.view.browsing import browsed, eventually, needs_browser, served

PAGES = ["/", "/pipeline/demo", "/?columns=state+optimizer.learning_rate", "/compare?run=lake&run=other"]
PAGES += [*(f"/run/{name}" for name in ("lake", "other", "nothing")), "/episodes/lake?step=4"]
PAGES += ["/group/lake?step=4&group=1", "/group/lake?step=4&group=2&tint=unit+credit"]
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}

pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("accessible")
    run = RunDirectory(make_run(folder, "lake"))
    shutil.copytree(tiny_model, run.path / "model")
    for name in ("other", "broken"):
        make_run(folder, name, optimizer={"learning_rate": 0.125}, ended=name == "other")
    (folder / "broken" / "failure.txt").write_text("the disk is full; free some space")
    make_run(folder / "demo", "sft")
    (folder / "demo" / "started.json").write_text('{"sft": {}}')
    answers = [RowAnswer(name, "It is 3.", 0.25, 0.5) for name in ("chosen", "rejected")]
    write_samples(
        RunDirectory(folder / "other"), [RowSample("pairs.jsonl row 1", "1 + 2?", answers, "reward", "It is 4.")]
    )
    with MetricsLog(run, []) as log:
        log.write(4, "warning", {"message": "entropy is low"})
    episodes = [
        played(tokens=4, group=group, index=index, rewards=(index * 1.0,)) for group in (1, 2) for index in (0, 1)
    ]
    credit = [[np.array([0, 0, value, value, -value, value], np.float32)] for value in (1, -1, 0.5, 0.25)]
    units = UnitRewards(Spans(np.array([0, 2, 4]), np.array([True, True])), np.array([0.25, -0.75]), 1.0, 0.1)
    write_episodes(run.episodes, 4, "train", episodes, Advantages(credit), [None, None, units, units])
    with served(folder) as server:
        yield server


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False), (400, True)])
def test_pages_keep_wcag_aa_and_fit(server, width, dark):
    from axe_playwright_python.sync_playwright import Axe

    broken = []
    with browsed(width, dark, refused=("404",)) as page:
        page.goto(server.address)
        for path in PAGES:
            page.goto(server.root + path)
            page.wait_for_timeout(600)
            for one in Axe().run(page, options=RULES).response["violations"]:
                broken.append((path, one["id"], [node["html"][:160] for node in one["nodes"][:3]]))
            if page.evaluate("document.documentElement.scrollWidth") > width:
                broken.append((path, "wider than the screen", []))
    assert broken == []


def test_everything_works_from_the_keyboard(server):
    with browsed() as page:
        page.goto(server.address)
        page.wait_for_selector("#list[data-unread='0']")
        page.keyboard.press("/")
        page.keyboard.type("other")
        eventually(lambda: page.locator("tr[data-line]").count() == 1)
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/run/other")
        page.wait_for_selector(".chart canvas")
        page.keyboard.press("j")
        page.keyboard.press("Home")
        first = page.locator(".chart .readout").first.inner_text()
        page.keyboard.press("ArrowRight")
        assert page.locator(".chart .readout").first.inner_text() != first
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.goto(f"{server.root}/group/lake?step=4&group=1")
        page.locator(".tokens").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert "token 1: advantage" in page.locator("#token").inner_text()
        page.goto(f"{server.root}/group/lake?step=4&group=2&tint=unit+credit")
        page.locator(".units").first.focus()
        for token in range(3):
            page.keyboard.press("ArrowRight")
            assert f"token {token}: " in page.locator("#token").inner_text()
        assert "unit credit -0.7500" in page.locator("#token").inner_text()
        page.keyboard.press("g")
        page.wait_for_url(server.root + "/")
