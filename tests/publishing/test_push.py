"""`posttrain export --push` against a server with the hub's interface: one commit with all files, a private repository, refusals."""

import base64
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from posttrain.cli.main import main


class Hub(BaseHTTPRequestHandler):
    """Creates repositories, and takes commits whose files are part of the request. `refuse`: answer commits with 403."""

    created: list[dict] = []
    committed: dict[str, bytes] = {}
    tokens: set[str] = set()
    refuse = False

    def do_POST(self):
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length) if length else self._chunks()
        self.tokens.add(self.headers.get("authorization", ""))
        kind, status = self.path.removeprefix("/api/models/user/name/").partition("/")[0], 200
        answer = {"errors": [], "warnings": []}  # of /api/validate-yaml
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            answer = {"url": "https://huggingface.co/user/name", "id": "user/name"}
        elif kind == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        elif kind == "commit" and self.refuse:
            answer, status = {"error": "no write access"}, 403
        elif kind == "commit":
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    self.committed[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            answer = {
                "commitUrl": "https://huggingface.co/user/name/commit/1",
                "commitOid": "1",
                "pullRequestUrl": None,
            }
        self._send(answer, status)

    def do_GET(self):
        self._send({"sha": "0", "id": "user/name", "siblings": []} if self.path.startswith("/api/models/") else {})

    def _chunks(self):
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        return b"".join(parts)

    def _send(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    Hub.created, Hub.committed, Hub.tokens, Hub.refuse = [], {}, set(), False
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield Hub
    server.shutdown()
    server.server_close()


def test_a_push_is_one_commit_of_the_export(hub, played, capsys):
    assert main(["export", str(played.path), "--push", "user/name", "--licence", "apache-2.0"]) == 0
    assert [(one["name"], one["visibility"]) for one in hub.created] == [("name", "private")]
    expected = {"README.md", "recipe.yaml", "config.json", "model.safetensors", "tokenizer.json"}
    assert expected <= set(hub.committed)
    assert hub.committed["model.safetensors"] == (played.path / "model/model.safetensors").read_bytes()
    assert b"license: apache-2.0" in hub.committed["README.md"]
    assert b'AutoModelForCausalLM.from_pretrained("user/name")' in hub.committed["README.md"]
    assert hub.tokens == {"Bearer hf_secret"}
    assert "https://huggingface.co/user/name/commit/1" in capsys.readouterr().out


def test_a_refused_push_is_reported(hub, played, capsys):
    hub.refuse = True
    assert main(["export", str(played.path), "--push", "user/name"]) == 1
    assert "user/name: the upload failed" in capsys.readouterr().err
    assert main(["export", str(played.path), "--push", "name"]) == 2
    assert "name is not USER/NAME" in capsys.readouterr().err
    assert hub.committed == {}


@pytest.mark.parametrize("where", ["model", "model/notes.txt", "recipe.yaml"])
def test_no_file_outside_of_the_run_is_pushed(hub, played, tmp_path, capsys, where):
    outside = tmp_path / "outside"
    run = shutil.copytree(played.path, tmp_path / "run")
    (run / "model/.env").write_text("KEY=hunter2")
    if where == "model":
        shutil.move(run / "model", outside)
    else:
        outside.write_text("hunter2" if "txt" in where else (run / where).read_text())
        (run / where).unlink(missing_ok=True)
    (run / where).symlink_to(outside)
    assert main(["export", str(run), "--push", "user/name"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert hub.committed == {}
    (run / where).unlink()
    shutil.copytree(outside, run / where) if where == "model" else shutil.copy(outside, run / where)
    assert main(["export", str(run), "--push", "user/name"]) == 0
    assert not any(b"hunter2" in content for name, content in hub.committed.items() if name != "notes.txt")
