"""Images in `serve`, in pages, in the terminal, and in requests to servers."""

import base64
import io
import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from plugins.images.tests.conftest import encoded, part, picture, text
from rich.console import Console

from posttrain import images
from posttrain.credit.units.offsets import align
from posttrain.data.messages import messages_of
from posttrain.data.rendering import Renderer
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.openai import complete
from posttrain.episode import StopReason
from posttrain.errors import InputError
from posttrain.rollout.store import read_episodes, write_episodes
from posttrain.rollout.transcript import TokenTranscript
from posttrain.serving.policy import PolicyServer
from posttrain.view.episodes import Sample, episode_page, prompt_text
from posttrain.view.templates import templates
from posttrain.view.terminal import view_episode
from posttrain_images import store
from tests.rollout.episodes import played

URL = f"data:image/png;base64,{base64.b64encode(encoded(picture())).decode()}"


@pytest.fixture
def client(policy_of):
    from starlette.testclient import TestClient

    server = PolicyServer(LocalEngine(policy_of("idefics3"), slots=2), "seeing")
    with TestClient(server.app(), base_url="http://127.0.0.1") as made:
        yield made


def ask(client, content):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "seed": 1, "temperature": 0}
    return client.post("/v1/chat/completions", json=body)


def test_serve_takes_images(client):
    parts = [{"type": "image_url", "image_url": {"url": URL}}, text("what is it?")]
    answer = ask(client, parts)
    assert answer.status_code == 200, answer.text
    alone = ask(client, "what is it?")
    assert answer.json()["usage"]["prompt_tokens"] > alone.json()["usage"]["prompt_tokens"] + 4
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    assert ask(client, [{"type": "image", "source": source}, text("what is it?")]).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "image", "path": "/etc/passwd"},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1/secret.png"}},
        {"type": "image", "bytes": "AAAA"},
    ],
)
def test_serve_reads_no_file_and_no_address(client, wrong):
    answer = ask(client, [wrong, text("what is it?")])
    assert answer.status_code == 400
    assert "image" in answer.text


def test_text_that_imitates_an_image_is_refused(client):
    [key] = images.MARK.findall(messages_of([{"role": "user", "content": [part(picture())]}], "messages")[0]["content"])
    alone = ask(client, f"\ufdd1{key}\ufdd1 what is it?")
    assert alone.status_code == 200
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": f"{images.mark(key)} what is it?"}]}
    answer = client.post("/v1/chat/completions", content=json.dumps(body))
    assert answer.status_code == 400
    assert "lone surrogate" in answer.text
    for prompt in (images.mark(key), [images.first_id(key)], [images.first_id(key) - 2**64]):
        answer = client.post("/v1/completions", content=json.dumps({"prompt": prompt, "max_tokens": 2}))
        assert answer.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_serve_forgets_the_images_of_a_request(client, stream):
    """Also those of a request that is refused. A conversation that sends its image again has the same answer."""
    folder, [first, *others] = images.folders()[-1], [picture(seed=1000 + n) for n in range(6)]
    before = {file.name for file in folder.glob("*")}, dict(store._same), dict(store._users)
    asked = [part(first), text("what is it?")]
    body = {"messages": [{"role": "user", "content": asked}], "max_tokens": 4, "seed": 1, "stream": stream}
    answers = [client.post("/v1/chat/completions", json=body)]
    for other in others:
        shown = [{"role": "user", "content": [part(other), text("?")]}]
        assert client.post("/v1/chat/completions", json=body | {"messages": shown}).status_code == 200
        refused = client.post("/v1/chat/completions", json=body | {"messages": shown, "max_tokens": -1})
        assert refused.status_code == 400
    answers.append(client.post("/v1/chat/completions", json=body))
    if not stream:
        assert answers[0].json()["choices"] == answers[1].json()["choices"]
        later = [*body["messages"], answers[0].json()["choices"][0]["message"], {"role": "user", "content": "sure?"}]
        assert client.post("/v1/chat/completions", json=body | {"messages": later}).status_code == 200
    assert ({file.name for file in folder.glob("*")}, dict(store._same), dict(store._users)) == before


def test_an_image_that_two_need_stays_until_both_have_ended():
    image, both = picture(seed=77), (ExitStack(), ExitStack())
    for later in both:
        with images.forgetting(later):
            [key] = images.MARK.findall(
                messages_of([{"role": "user", "content": [part(image)]}], "messages")[0]["content"]
            )
    both[0].close()
    assert store.load(key).shape == (40, 64, 3)
    both[1].close()
    with pytest.raises(InputError, match="restore"):
        store.load(key)


@pytest.fixture
def episode(policy_of, tmp_path, monkeypatch):
    """An episode of a run with an image, and the run."""
    monkeypatch.setattr(images, "_folders", [tmp_path / "images"])
    policy = policy_of("idefics3")
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    shown = messages_of([{"role": "user", "content": [part(picture(seed=3)), text("<b>what</b>?")]}], "messages")
    transcript = TokenTranscript(renderer, shown)
    answer = [*policy.tokenizer("red", add_special_tokens=False)["input_ids"], renderer.end]
    transcript.answer(answer, [-1.0] * len(answer), StopReason.END_TOKEN)
    made = played()
    made.streams, made.turns, made.messages = transcript.streams(), transcript.turns, transcript.messages
    write_episodes(tmp_path / "episodes", 1, "train", [made])
    [stored] = read_episodes(tmp_path / "episodes" / "step_000001.train.jsonl.zst").episodes
    assert (stored.streams[0].ids == made.streams[0].ids).all()
    return stored


def test_pages_show_the_pictures(policy_of, episode, tmp_path):
    page = episode_page(Sample("", episode, None, None), 1.0, None, None, tmp_path)
    [uri] = page.messages[0].pictures
    assert base64.b64decode(uri.partition(",")[2]) == next((tmp_path / "images").glob("*.png")).read_bytes()
    key = images.MARK.findall(episode.messages[0]["content"])[0]
    assert page.messages[0].text == f"[image {key}]<b>what</b>?"
    drawn = templates().from_string("{% import 'components.html.j2' as parts %}{{ parts.conversation(page) }}")
    html = drawn.render(page=page)
    assert f'<img class="shown" src="{uri}"' in html
    assert "<b>what" not in html
    count, shown = prompt_text(episode, images.decoding(policy_of("idefics3").tokenizer.decode))
    assert count == episode.turns[0].start
    assert f"[image {key}]" in shown
    # A picture that was altered after the run is not shown, by a page or to a judge.
    file = tmp_path / "images" / f"{key}.png"
    stored = file.read_bytes()
    judge = SimpleNamespace(base_url="", chat=SimpleNamespace(completions=SimpleNamespace(create=dict)))
    for altered in (encoded(picture(seed=9)), stored[: len(stored) // 2], encoded(picture(seed=3), "JPEG")):
        file.write_bytes(altered)
        message = episode_page(Sample("", episode, None, None), 1.0, None, None, tmp_path).messages[0]
        assert not message.pictures
        assert key in message.problems[0]
        with pytest.raises(InputError, match=key):
            complete("engine", judge, "judge", episode.messages[:1])
    assert key in drawn.render(page=episode_page(Sample("", episode, None, None), 1.0, None, None, tmp_path))
    file.write_bytes(stored)
    assert episode_page(Sample("", episode, None, None), 1.0, None, None, tmp_path).messages[0].pictures == (uri,)
    # Files that a foreign run has instead of pictures.
    (tmp_path / "images" / f"{key}.png").unlink()
    assert not episode_page(Sample("", episode, None, None), 1.0, None, None, tmp_path).messages[0].pictures
    (tmp_path / "images" / f"{key}.png").symlink_to("/etc/passwd")
    assert not episode_page(Sample("", episode, None, None), 1.0, None, None, tmp_path).messages[0].pictures


def test_the_terminal_names_images(episode):
    console = Console(file=io.StringIO(), width=80)
    console.print(view_episode(episode, None))
    assert "[image " in console.file.getvalue()
    assert "\udfff" not in console.file.getvalue()


def test_ids_of_images_are_decoded_by_their_keys(policy_of, episode):
    tokenizer = policy_of("idefics3").tokenizer
    ids = episode.streams[0].ids
    key = images.MARK.findall(episode.messages[0]["content"])[0]
    assert tokenizer.decode(ids).count(f"[image {key}]") >= 1
    assert align(ids[episode.turns[0].start :].tolist(), tokenizer.decode).slice(0, 1)


def test_servers_of_other_models_get_images_as_data_urls():
    content = messages_of([{"role": "user", "content": [text("a "), part(picture()), text(" b")]}], "messages")
    sent = {}

    def create(**settings):
        sent.update(settings)
        raise RuntimeError

    client = SimpleNamespace(
        base_url="http://127.0.0.1", chat=SimpleNamespace(completions=SimpleNamespace(create=create))
    )
    with pytest.raises(RuntimeError):
        complete("engine", client, "other", content)
    parts = sent["messages"][0]["content"]
    assert [one["type"] for one in parts] == ["text", "image_url", "text"]
    [key] = images.MARK.findall(content[0]["content"])
    received = messages_of([{"role": "user", "content": parts}], "messages")
    assert received[0]["content"] == content[0]["content"]
    assert (store.load(key) == picture()).all()
    with pytest.raises(InputError, match="not stored"):
        complete("engine", client, "other", [{"role": "user", "content": images.mark("0" * 12)}])
