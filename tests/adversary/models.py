"""Attacks on programs that run a model for others: `posttrain serve`, and the tasks and logs of lm-eval and inspect-ai.

The surfaces are functions as in `tests.adversary.surfaces`.
"""

import atexit
import io
import json
import math
import random
import socket
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest import mock

from tests.adversary import hosts

SECONDS = 20
"""More processor time than the longest answer takes."""
_PATIENCE = 300
"""Seconds to wait for an answer on a machine that does other work."""
KEY = "sk-of-the-user"
SERVERS = ExitStack()
"""Closes the servers of this process."""


@cache
def served_port() -> int:
    """The port of a server of a tiny model in this process, with `KEY`, until `SERVERS` is closed."""
    atexit.register(SERVERS.close)
    return SERVERS.enter_context(_served())


@contextmanager
def _served() -> Iterator[int]:
    from posttrain.engines.factory import open_engine
    from posttrain.loopback import http_server, open_listener
    from posttrain.models.policy import Policy
    from posttrain.recipe.compose import section
    from posttrain.recipe.engines import LocalEngineRecipe
    from posttrain.recipe.model import ModelRecipe
    from posttrain.serving import Server, guarded

    policy = Policy(section(ModelRecipe, path=str(hosts.tiny_model())))
    engine = open_engine(policy, section(LocalEngineRecipe), weights_change=False)
    with open_listener(0, "--port") as on:
        port = on.getsockname()[1]
        server = http_server(guarded(Server(engine, "tiny").app(), port, KEY))
        thread = threading.Thread(target=server.run, args=([on],), daemon=True)
        thread.start()
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join()


def _post(port: int, path: str, data: bytes, key: str = KEY) -> tuple[int, bytes]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)) as connection:
        connection.request("POST", path, data, {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        return response.status, response.read()


_CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "gold"},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "max_tokens": 3,
    "stop": ["x"],
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "n": 2,
    "seed": 1,
    "logprobs": True,
}
_TEXT = {"prompt": ["a b", "c"], "max_tokens": 3, "logprobs": 1, "stream": False, "min_p": 0.1, "echo": False}
_PLAIN = json.dumps({"prompt": "a b c", "max_tokens": 4, "temperature": 0}).encode()


def _plain_answer(port: int) -> str:
    status, answer = _post(port, "/v1/completions", _PLAIN)
    assert status == 200, answer
    return str(json.loads(answer)["choices"][0]["text"])


_expected = cache(_plain_answer)
"""Port -> the greedy answer of a server before any attack."""


def serve(seed: int, folder: Path) -> None:
    """Changed requests to `posttrain serve`: each is answered or refused, none stops it, and its answers stay the same."""
    draw = random.Random(seed)
    port = served_port()
    expected = _expected(port)
    odd: list[Any] = [None, True, -1, 0, 1e999, 1e-320, 10**30, "", "\x00\ud800", "<|im_end|>", [], {}, [[]] * 50]
    odd += ["9" * 5_000, "x " * 200_000, [1, 2], [[1]] * 3_000, [10**30], ["a", 1], {"type": "text"}, ["\ufffd"] * 70]

    def changed(value: Any) -> Any:
        if draw.random() < 0.1:
            return draw.choice(odd)
        if isinstance(value, dict):
            return {key: changed(item) for key, item in value.items() if draw.random() > 0.05}
        return [changed(item) for item in value] if isinstance(value, list) else value

    for _ in range(8):
        path, valid = draw.choice([("/v1/chat/completions", _CHAT), ("/v1/completions", _TEXT)])
        body = changed({**valid, "stream": draw.random() < 0.3})
        if isinstance(body, dict) and not draw.randrange(20):
            body["max_tokens"] = draw.choice([10**30, 2_000])
        data = bytearray(json.dumps(body).encode())
        if draw.random() < 0.2:
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.1:
            depth = draw.choice([150, 990, 50_000])
            data = bytearray(b'{"prompt": "a", "x": ' + b"[" * depth + b"]" * depth + b"}")
        given = draw.choice([KEY] * 6 + [KEY + "x", ""])
        if given == KEY and draw.random() < 0.1:
            _leave(port, path, bytes(data))
            continue
        started = time.process_time()
        status, answer = _post(port, path, bytes(data), given)
        what = (status, answer[:200], bytes(data[:400]))
        assert time.process_time() - started < SECONDS, what
        assert status in ((200, 400) if given == KEY else (401,)), what
        assert status == 200 or json.loads(answer)["error"]["message"], what
        assert b"Traceback" not in answer, what
        if status == 200 and not answer.startswith(b"data: "):
            _check_numbers(json.loads(answer))
    assert _plain_answer(port) == expected, "another answer than before"


def _leave(port: int, path: str, data: bytes) -> None:
    """Send a request, and close the connection without waiting for the answer."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE)) as connection:
        lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Authorization: Bearer {KEY}"]
        connection.sendall("\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data)


def _check_numbers(answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        logprobs = choice["logprobs"] or {}
        values = logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content", [])]
        assert all(math.isfinite(value) and value <= 0 for value in values), choice


_TASKS = {
    "choice": """
task: choice
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "answer": """
task: answer
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{sum}}"
generation_kwargs: {until: ["e"], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "text": """
task: text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
metric_list: [{metric: word_perplexity}]
""",
}
_SOURCE = (
    "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {}}}}}\ntest_split: test\nmetadata: {{version: 1}}\n"
)


@cache
def _task_manager(include_path: str | None = None) -> Any:
    """lm-eval reads thousands of task files for one."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path)


def harness(seed: int, folder: Path) -> None:
    """Untrusted rows and scores of an lm-eval task: finite numbers or one sentence, and no code runs."""
    import datasets

    from posttrain.evaluation import harness as harness_stage

    draw = random.Random(seed)
    ran = folder / "ran"
    code = f"{{{{ cycler.__init__.__globals__.os.system('touch {ran}') }}}}"
    odd: list[Any] = [
        None,
        True,
        -1,
        99,
        1e999,
        "",
        "\x00",
        "\ud800",
        "[" * 3_000,
        "9" * 5_000,
        [],
        {},
        ["a"],
        {"a": 1},
    ]
    odd += [
        code,
        "[[1]",
        f"__import__('os').system('touch {ran}')",
        "{{question}}",
        "x " * 2_000,
        "<|im_end|>",
        "0",
        "\n",
    ]
    rows: list[Any] = [
        {"question": f"What is {n} plus 1?", "choices": [str(n + 1), "a dog"], "answer": 0, "sum": str(n + 1)}
        for n in range(3)
    ]
    for row in rows:
        if draw.random() < 0.5:
            row[draw.choice(list(row))] = draw.choice(odd)
    rows += [draw.choice([{}, [], 3])] if draw.random() < 0.1 else []
    kind = draw.choice(list(_TASKS))
    data = bytearray("".join(json.dumps(row) + "\n" for row in rows).encode())
    if draw.random() < 0.2:
        data[draw.randrange(len(data))] = draw.randrange(256)
    (folder / "rows.jsonl").write_bytes(data)
    task = folder / f"{kind}.yaml"
    task.write_text(_TASKS[kind] + _SOURCE.format(folder / "rows.jsonl"))
    words = [f"tasks={task}", f"model.path={hosts.tiny_model()}", f"runs={folder}", "name=run", "plots=false"]
    kept, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, folder / "cache"
    _task_manager()
    started = time.process_time()
    try:
        with mock.patch.object(harness_stage, "TaskManager", _task_manager):
            exit_code, _, errors = hosts.quietly(["evaluate", "harness", *words])
    finally:
        datasets.config.HF_DATASETS_CACHE = kept
    what = f"{kind}: {errors[-200:]} {bytes(data)[:300]!r}"
    assert time.process_time() - started < 3 * SECONDS, what
    assert exit_code in (0, 2), what
    assert "with --debug" not in errors, what
    assert not ran.exists(), f"code of a row ran: {what}"
    scores = folder / "run" / "harness.json"
    if exit_code == 0:
        values = json.loads(scores.read_text())
        json.dumps(values, allow_nan=False)
        _changed_scores(draw, scores)
    else:
        message = errors.splitlines()[-1]  # after progress bars
        assert "posttrain: " in message, what
        assert len(message) < 2_000, what


def _changed_scores(draw: random.Random, scores: Path) -> None:
    """Change the file of scores in a run, and look at the run."""
    text = scores.read_text()
    pieces = [
        "null",
        "[]",
        "-1",
        '"',
        "9" * 5_000,
        "\n",
        "[" * 3_000,
        "\x1b[2J",
        "<script>",
        "NaN",
        "1e999",
        "{}",
        "true",
    ]
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice(pieces) + text[place + draw.randrange(9) :]
    scores.write_text(text)
    run = str(scores.parent)
    for command in (["table", run], ["compare", run, run], ["report", run]):
        exit_code, out, errors = hosts.quietly(command)
        assert exit_code in (0, 1, 2), command
        assert "with --debug" not in errors, f"{command[0]}: {errors[-400:]} {text[:400]}"
        assert "\x1b[2J" not in out + errors, command
    assert "<script>" not in (scores.parent / "report.html").read_text()


def inspect_log(seed: int, folder: Path) -> None:
    """A changed log of inspect-ai: finite scores, or one sentence."""
    from posttrain.errors import InputError
    from posttrain.evaluation.inspect_log import read_inspect_log
    from posttrain.evaluation.statistics import estimate

    draw = random.Random(seed)
    pieces = [
        b"null",
        b"[]",
        b"-1",
        b'"',
        b"9" * 400,
        b"\n",
        b"NaN",
        b"{}",
        b"1e999",
        b"[" * 3_000,
        b"\xff",
        b"\\ud800",
    ]

    def changed(data: bytes, times: int) -> bytes:
        for _ in range(times):
            place = draw.randrange(len(data) + 1)
            data = data[:place] + draw.choice(pieces) + data[place + draw.randrange(9) :]
        return data

    path = folder / f"log.{draw.choice(['eval', 'json'])}"
    log = _log(path.suffix[1:])
    if path.suffix == ".eval" and draw.random() < 0.8:
        with zipfile.ZipFile(io.BytesIO(log)) as given, zipfile.ZipFile(path, "w") as made:
            for name in given.namelist():
                made.writestr(name, changed(given.read(name), draw.randrange(3)))
    else:
        path.write_bytes(changed(log, draw.randrange(1, 6)))
    try:
        metrics, digests = read_inspect_log(path)
        message = ""
    except InputError as error:
        metrics, digests, message = {}, {}, str(error)
    assert "\n" not in message, message
    assert len(message) < 1_000, message
    assert all(isinstance(one, str) for one in digests.values())
    for metric in metrics.values():
        assert math.isfinite(estimate(metric.scores).value), metric


@cache
def _log(kind: str) -> bytes:
    """The bytes of a log of inspect-ai of two samples."""
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes

    task = inspect_ai.Task(
        dataset=[Sample(input=f"Say {letter}.", target=letter) for letter in "ab"], scorer=includes()
    )
    with tempfile.TemporaryDirectory() as folder:
        (log,) = inspect_ai.eval(task, model="mockllm/model", log_dir=folder, log_format=kind, display="none")  # type: ignore[arg-type]
        return Path(log.location.removeprefix("file://")).read_bytes()
