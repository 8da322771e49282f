"""Pages that the build makes from the code, and tables from stored results. mkdocs calls the functions `on_*`."""

import json
import re
from pathlib import Path
from typing import Any


def markdown_of_metrics() -> str:
    """The page of all metrics."""
    from posttrain.runs.panels import all_metrics

    meanings = {name: metric.sentence for name, metric in all_metrics().items()}
    lines = [
        "# Metrics",
        "",
        "Every line of `metrics.jsonl` has `kind` (`train`, `evaluation`, `final`, `warning`), `step`, and the metrics below.",
        "Metrics of held-out episodes have no prefix, and those of training episodes have `rollout/`. `_low` and `_high` are the",
        "ends of 95% intervals, and `validation/loss/DOMAIN` is the loss of one domain. `*` stands for names of the run.",
        "This page is generated from the declarations in the sections of recipes.",
        "",
        "| metric | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in sorted(meanings.items())]
    return "\n".join(lines) + "\n"


def markdown_of_commands() -> str:
    """The page of all commands with their arguments and options."""
    import typer.main

    from posttrain.cli.main import app

    parts = [
        "# Command line\n\nThis page is generated from the commands. `posttrain COMMAND --help` shows the same. Commands marked with "
        "*recipe keys* also take recipe files and `key=value` overrides ([recipe keys](recipes.md)).\n"
    ]
    parts += _commands(typer.main.get_command(app), "posttrain")
    return "\n".join(parts)


def _commands(command: Any, name: str, parent: Any = None) -> list[str]:
    """Markdown of a command, then of its subcommands. `parent`: context of its group."""
    help_text = re.sub(r"\n{3,}", "\n\n", (command.help or "").replace("\b", "").replace("<", "&lt;")).strip()
    parts = [f"\n## `{name}`\n" if name.count(" ") <= 1 else f"\n### `{name}`\n", help_text, ""]
    if getattr(command, "context_settings", {}).get("ignore_unknown_options"):
        parts.append("Takes *recipe keys*.\n")
    rows = []
    for parameter in command.params:
        words = ", ".join(f"`{word}`" for word in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            words = f"`{parameter.name.upper()}`"
        text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|").replace("<", "&lt;")
        if not getattr(parameter, "hidden", False) and "--help" not in parameter.opts:
            rows.append(f"| {words} | {text} |")
    if rows:
        parts += ["| argument or option | |", "|---|---|", *rows, ""]
    if hasattr(command, "list_commands"):
        from typer import Context

        context = Context(command, parent, info_name=name.split()[-1])
        for each in command.list_commands(context):
            parts += _commands(command.get_command(context, each), f"{name} {each}", context)
    return parts


AUDIT = Path(__file__).resolve().parents[1] / "results" / "audit.jsonl"
"""What `posttrain env audit --out` wrote."""
_WITHOUT_WORK = ("nothing", "echo", "repeat", "injection")


def markdown_of_audit(part: str) -> str:
    """The defects, or all tasks with the results of the players, from `AUDIT`."""
    rows = [json.loads(line) for line in AUDIT.read_text(encoding="utf-8").splitlines()]
    if part == "defects":
        lines = ["| task | check | finding | shown again by |", "|---|---|---|---|"]
        for row in rows:
            checks: dict[str, list[dict[str, Any]]] = {}
            for finding in row["findings"]:
                if finding["defect"]:
                    checks.setdefault(finding["check"], []).append(finding)
            for check, found in checks.items():
                more = f" ({len(found) - 1} more like this)" if len(found) > 1 else ""
                text = f"{_cell(found[0]['text'])}{more}"
                lines.append(f"| `{row['name']}` | {check} | {text} | `{_cell(found[0]['command'])}` |")
        return "\n".join(lines)
    lines = ["| task | seeds | oracle | random | best without work | step, ms | defects | notes |"]
    lines.append("|---|--:|--:|--:|--:|--:|---|---|")
    for row in rows:
        players = {name: score["mean_return"] for name, score in row["players"].items()}
        idle = [players[name] for name in _WITHOUT_WORK if players.get(name) is not None]
        numbers = [players.get("oracle"), players.get("random"), max(idle, default=None), row["step_ms"]]
        cells = ["–" if number is None else f"{number:.3g}" for number in numbers]
        for defect in (True, False):
            kinds = dict.fromkeys(finding["check"] for finding in row["findings"] if finding["defect"] is defect)
            cells.append(", ".join(kinds))
        lines.append(f"| `{row['name']}` | {row['seeds'][1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


IMPORT = re.compile(r"^<!-- posttrain import(?: (?P<recipe>\S+\.yaml))?(?: --rows (?P<rows>\d+))? -->\n", re.M)
"""Stands for the table that the importer makes of the commands in the last code block before it, beside a recipe if it names one."""


def markdown_of_import(before: str, recipe: str | None = None, rows: str | None = None) -> str:
    """What `posttrain import --markdown` prints for the last code block of `before`, up to our own command there."""
    from posttrain_import.commands import import_commands
    from posttrain_import.tables import markdown_table

    block = re.findall(r"^```\w*\n(.*?)^```", before, flags=re.M | re.S)[-1].partition("\n\nposttrain ")[0]
    commands = import_commands(block, {}, int(rows) if rows else None)[0]
    file = None if recipe is None else str(Path(__file__).resolve().parents[2] / recipe)
    return "\n".join(markdown_table(command, file) for command in commands)


KEYS = re.compile(r"^(?P<marks>#{2,3}) `(?P<name>\w+)`\n(?P<about>(?:(?![|#]).*\n)*)(?P<table>(?:\|.*\n?)*)", re.M)
"""A stage or section of docs/reference/recipes.md with the table of its keys."""


def pages_of_keys(reference: str) -> tuple[str, dict[str, str]]:
    """The reference of recipes with links in place of its tables, and address -> text of a page for each table.

    A table of five columns is unreadable on a phone, so each key is a heading with its description.
    """
    pages: dict[str, str] = {}
    stage = ""

    def page_of(match: re.Match[str]) -> str:
        nonlocal stage
        stage = stage if match["marks"] == "###" else match["name"]
        start = f"{match['marks']} `{match['name']}`\n{match['about']}"
        if not match["table"]:
            return start
        title = f"`{stage}`: `{match['name']}`" if match["marks"] == "###" else f"`{stage}`: keys without a section"
        parts = [f"# {title}\n"]
        rows = match["table"].splitlines()[2:]
        for row in rows:
            key, kind, allowed, default, about = re.split(r"(?<!\\) \| ", row[2:-2].replace(" |  | ", " | \u200b | "))
            kind = f" For type {kind}." if kind.strip("\u200b ") else ""
            text = [f"Default {default}; must be {allowed}.{kind}", about]
            parts += [f"## {key}\n", *(f"{part}\n".replace("\\|", "|").replace("<", "&lt;") for part in text)]
        name = stage if match["marks"] == "##" else f"{stage}-{match['name']}"
        pages[f"reference/recipes/{name}.md"] = "\n".join(parts)
        keys = "1 key" if len(rows) == 1 else f"{len(rows)} keys"
        return f"{start}\n[{keys}](recipes/{name}.md)\n"

    return KEYS.sub(page_of, reference), pages


def _reference() -> str:
    return (Path(__file__).resolve().parents[1] / "reference" / "recipes.md").read_text(encoding="utf-8")


def on_config(config: Any) -> Any:
    """Put the pages of recipe keys into the navigation, below their reference."""
    listed: dict[str, list[Any]] = {}
    for path in pages_of_keys(_reference())[1]:
        stage, _, section = Path(path).stem.partition("-")
        listed.setdefault(stage, []).append({section or "without a section": path})
    for group in config["nav"]:
        for item in group.get("Reference", []):
            if isinstance(item, dict) and "Recipe keys" in item:
                item["Recipe keys"] = ["reference/recipes.md", *({stage: pages} for stage, pages in listed.items())]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put generated tables where a page asks for them. Commands lose their prompt, so that they can be copied."""
    if page is not None and page.file.src_uri == "reference/recipes.md":
        return pages_of_keys(markdown)[0]
    while (found := IMPORT.search(markdown)) is not None:
        before = markdown[: found.start()]
        markdown = before + markdown_of_import(before, found["recipe"], found["rows"]) + markdown[found.end() :]
    markdown = re.sub(
        r"^```console\n.*?^```", lambda match: re.sub(r"^\$ ", "", match[0], flags=re.M), markdown, flags=re.M | re.S
    )
    return re.sub(r"^<!-- audit: (\w+) -->$", lambda match: markdown_of_audit(match[1]), markdown, flags=re.M)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    for path, text in (
        ("reference/command_line.md", markdown_of_commands()),
        ("reference/metrics.md", markdown_of_metrics()),
        *pages_of_keys(_reference())[1].items(),
    ):
        files.append(File.generated(config, path, content=text))
    return files
