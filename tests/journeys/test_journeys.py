"""The helpers of the journeys read pages as a user does."""

from tests import journeys
from tests.journeys import commands, dry, with_values

PAGE = """# A page

```
posttrain sft a.yaml
```

## Of two

```console
$ posttrain rl b.yaml steps=50 \\
    model.path="some model"
step 1: ...
```

## Last

```
posttrain evaluate text p.jsonl --out results.json
python other.py
```
"""


def test_commands_are_joined_and_found_by_section(tmp_path, monkeypatch):
    monkeypatch.setattr(journeys, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    rl = 'posttrain rl b.yaml steps=50 model.path="some model"'
    text = "posttrain evaluate text p.jsonl --out results.json"
    assert commands("page.md") == ["posttrain sft a.yaml", rl, text]
    assert commands("page.md", "Of two") == [rl]
    assert commands("page.md", program="python") == ["python other.py"]


def test_values_change_and_keys_are_not_added():
    changed = with_values("posttrain rl b.yaml steps=50 --on h100", {"steps": 2, "--on": "h200", "seed": 1})
    assert changed == "posttrain rl b.yaml steps=2 --on h200"


def test_only_commands_that_have_a_dry_run_get_one():
    assert dry("posttrain rl b.yaml").endswith("--dry-run")
    assert dry("posttrain evaluate judge p.jsonl").endswith("--dry-run")
    assert dry("posttrain evaluate text p.jsonl") == "posttrain evaluate text p.jsonl"
    assert dry("posttrain plot runs/a") == "posttrain plot runs/a"
