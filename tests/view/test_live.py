"""`posttrain view` as a process: who may ask, what it reads and writes, and the pages in a real browser."""

import signal
import subprocess
from http.client import HTTPConnection

import pytest

from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from tests.rollout.episodes import played
from tests.runs.comparing import make_run
from tests.view.browsing import Server, browsed, command, eventually, needs_browser, served, trained

ATTACK = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "runs"
    make_run(path.parent, "secret")
    make_run(path, "first", seed=1)
    make_run(path, "second", seed=2)
    return path


@pytest.fixture(scope="module")
def server(folder):
    with served(folder) as server:
        yield server


def test_only_the_pages_of_this_server_with_its_token_are_answered(server):
    cookie = server.cookie()
    port = server.root.rpartition(":")[2]
    assert server.ask("/", cookie=cookie).status == 200
    assert server.ask("/", cookie=cookie, host=f"localhost:{port}").status == 200
    assert server.ask("/", cookie=cookie, origin=server.root).status == 200
    refused = {
        "no token": server.ask("/"),
        "wrong token": server.ask("/?token=wrong"),
        "wrong token with a cookie": server.ask("/?token=wrong", cookie=cookie),
        "wrong cookie": server.ask("/", cookie=f"{cookie}x"),
        "no token for a file": server.ask("/static/page.js"),
        "no token for events": server.ask("/events"),
        "foreign host": server.ask("/", cookie=cookie, host="posttrain.example:80"),
        "foreign port": server.ask("/", cookie=cookie, host="127.0.0.1:1"),
        "foreign origin": server.ask("/", cookie=cookie, origin="https://posttrain.example"),
        "null origin": server.ask("/", cookie=cookie, origin="null"),
    }
    assert {name: answer.status for name, answer in refused.items() if answer.status != 403} == {}
    assert all(len(answer.text.splitlines()) == 1 and "first" not in answer.text for answer in refused.values())


def test_the_token_moves_from_the_address_to_a_cookie_and_is_not_sent_elsewhere(server):
    answer = server.ask(f"/run/first?token={server.token}&x=1")
    assert answer.status == 303
    assert answer.headers["location"] == "/run/first?x=1"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    page = server.ask("/run/first", cookie=server.cookie())
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert server.token not in page.text
    for target in ("//x.example/", "///x.example", "/\\x.example/", "http://x.example/", "http://127.0.0.1/", "*"):
        answer = server.ask(f"{target}?token={server.token}")
        assert (answer.status, answer.headers["location"], answer.headers["set-cookie"]) == (400, None, None), target


def test_names_do_not_leave_the_folder(server):
    cookie = server.cookie()
    for name in ("../secret", "%2e%2e/secret", "first/../../secret", "/etc", "nothing", "first%00"):
        for page in ("run", "charts", "state"):
            answer = server.ask(f"/{page}/{name}", cookie=cookie)
            assert answer.status == 404, (page, name)
            assert "learning_rate" not in answer.text


def test_nothing_is_written_and_no_form_is_accepted(server, folder):
    before, cookie = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}, server.cookie()
    for page in ("/", "/list", "/run/first", "/charts/first", "/state/first"):
        assert server.ask(page, cookie=cookie).status == 200
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    for page in ("/", "/run/first", "/events"):
        assert server.ask(page, "POST", "x" * 100_000, cookie=cookie, origin=server.root).status == 405


def test_ctrl_c_ends_the_server_without_complaint_while_a_page_is_open(folder):
    words = command("view", folder, "--no-browser")

    def heed_interrupts():
        """Tests that run in the background ignore interrupts, and their children inherit that."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes, preexec_fn=heed_interrupts) as process:
        server = Server(process.stdout.readline().strip(), process)
        connection = HTTPConnection(server.root.removeprefix("http://"), timeout=60)
        connection.request("GET", "/events", headers={"cookie": server.cookie()})
        assert connection.getresponse().readline() == b"retry: 1000\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "posttrain: interrupted\n"


def test_code_that_a_run_names_is_not_imported(tmp_path):
    code, proof = tmp_path / "mine.py", tmp_path / "executed"
    code.write_text(f"open({str(proof)!r}, 'w')\n")
    run = make_run(tmp_path / "runs", "foreign")
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("type: bandit", f"type: {code}"))
    with served(tmp_path / "runs") as server:
        page = server.ask("/run/foreign", cookie=server.cookie())
        assert page.status == 200
        assert str(code) in page.text
    assert not proof.exists()
    done = subprocess.run(command("view", tmp_path / "none"), capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


@needs_browser
def test_text_of_models_stays_text_and_long_lines_stay_in_the_page(tmp_path):
    path = make_run(tmp_path, "hostile")
    with MetricsLog(RunDirectory(path), []) as log:
        log.write(4, "warning", {"message": ATTACK})
        log.write(5, "warning", {"message": "x" * 1_000_000})
    (path / "failure.txt").write_text(ATTACK)
    episodes = [played(index=0), played(index=1, rewards=(0.0,))]
    for episode, answer in zip(episodes, (ATTACK, "y" * 1_000_000), strict=True):
        episode.messages[0]["content"] = episode.messages[1]["content"] = episode.turns[0].answer = answer
    write_episodes(RunDirectory(path).episodes, 1, "train", episodes)
    with served(tmp_path) as server, browsed(width=400) as page:
        page.goto(server.address)
        assert page.locator("[data-line]").count() == 1
        page.goto(f"{server.root}/run/hostile")
        page.wait_for_selector("#charts[data-ready] canvas")
        page.locator(".messages summary").click()
        assert "onerror" in page.locator("#marks").inner_text()
        assert page.title() == "hostile · posttrain"
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.locator("#state [data-state]").get_attribute("data-state") == "failed"
        for place in ("episodes/hostile", "group/hostile?step=1&group=0", "group/hostile?step=1&group=0&tint=nothing"):
            page.goto(f"{server.root}/{place}")
            assert "onerror" in page.locator("main").inner_text()
            assert "posttrain" in page.title()
            assert page.evaluate("document.documentElement.scrollWidth") <= 400
            assert page.locator("main img, main script").count() == 0


@needs_browser
@pytest.mark.slow
def test_curves_can_be_zoomed_smoothed_filtered_and_put_on_a_log_scale(tmp_path):
    run = RunDirectory(make_run(tmp_path, "curves"))
    with MetricsLog(run, []) as log:
        for step, value in enumerate((-0.25, 0.0125, 0.155, -0.125, 3e-18, 0.0096), start=10):
            log.write(step, "train", {"rollout/return": value, "loss/policy": value, "speed/tokens_per_second": 2e6})
    with served(tmp_path) as server, browsed() as page:
        page.goto(server.address)
        page.goto(f"{server.root}/run/curves")
        page.wait_for_selector("#charts[data-ready] canvas")
        every = page.locator(".chart:visible").count()
        page.fill("#only", "tokens per second")
        assert page.locator(".chart:visible h3").all_inner_texts() == ["Tokens per second"]
        page.fill("#only", "")
        assert page.locator(".chart:visible").count() == every
        page.evaluate("import('/static/charts.js').then(module => { window.smoothed = module.smoothed; return true; })")
        assert page.evaluate("window.smoothed([0, 3, 6, 3, 0], 3)") == [0, 3, 4, 3, 0]
        plot, everything = page.locator(".plot .u-over").first, page.locator("#all")
        place = plot.bounding_box()
        for x, act in ((0.3, page.mouse.down), (0.7, page.mouse.up)):
            page.mouse.move(place["x"] + x * place["width"], place["y"] + 50, steps=4)
            act()
        page.wait_for_selector("#all:enabled")
        assert "not" in everything.inner_text()
        page.check("#log")  # a tick for each step from rounding noise on had no end
        page.fill("#smoothing", "11")
        assert page.locator("#window").inner_text() == "11 points"
        everything.click()
        page.wait_for_selector("#all:disabled")
        assert page.locator(".chart canvas").count() >= every
        page.locator(".plot").first.focus()
        for key in ("Home", "+"):
            page.keyboard.press(key)
        everything.click()
        assert "step" in page.locator(".readout").first.inner_text()


@needs_browser
@pytest.mark.slow
def test_curves_grow_while_a_run_trains_and_a_killed_run_has_stopped(tmp_path, tiny_model):
    with trained(tmp_path, tiny_model) as training, served(tmp_path) as server, browsed() as page:
        page.goto(server.address)
        page.wait_for_selector("[data-state=running]", timeout=120_000)  # appears without a reload
        page.goto(f"{server.root}/run/live")
        page.evaluate("window.before = 'the same page'")

        def last_step():
            return page.evaluate(
                "Number(document.querySelector('.chart .plot')?.ariaLabel.match(/at step (\\d+)/)?.[1] ?? 0)"
            )

        eventually(lambda: last_step() > 2)
        seen = last_step()
        eventually(lambda: last_step() > seen + 5)
        assert page.evaluate("window.before") == "the same page"
        assert page.locator("#state [data-state]").get_attribute("data-state") == "running"
        training.send_signal(signal.SIGKILL)
        page.wait_for_selector("#state [data-state=stopped]", timeout=20_000)
        page.goto(server.root)
        page.wait_for_selector("tr[data-state=stopped]")
