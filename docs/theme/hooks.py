"""Pages that the build makes from the code, and tables from stored results. mkdocs calls the functions `on_*`."""

import ast
import json
import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src" / "posttrain"

METRIC = re.compile(
    r"(?:rollout|policy|loss|kl|entropy|critic|units|optimizer|tokens|time|reward|preference|validation|test|correction"
    r"|credit|agent|tools|teacher|ptx|reference|generate|speed)/[a-z_0-9]+|memory/(?:key_value_cache|process|gpu)"
)
"""A metric of `metrics.jsonl`, as the source spells it."""
NOT_METRICS = {"tokens/s"}
"""Strings of the source that look like metrics."""
MEANINGS = {
    "agent/abandoned": "calls of agents whose client gave up before the answer",
    "agent/calls": "answered calls of agents",
    "agent/crashed": "agents that exited with an error",
    "agent/finished": "agents that finished",
    "agent/late": "calls after the end of their episode",
    "agent/malformed_calls": "tool calls that could not be parsed",
    "agent/never_called": "agents that made no call",
    "agent/no_report": "agents without a usable report",
    "agent/no_reward": "agents whose environment or reward function failed",
    "agent/not_started": "agents that could not be started",
    "agent/refused": "refused calls of agents",
    "agent/retried": "repeated requests that got the recorded answer",
    "agent/streams": "streams of the episodes of agents",
    "agent/timed_out": "agents that ran longer than `agent.timeout`",
    "correction/mismatch": "mean |log ratio| of learner and engine, before weights and rejection",
    "correction/rejected": "share of tokens rejected by `loss.correction`",
    "correction/rejected_streams": "share of streams rejected by `loss.correction`",
    "correction/truncated": "share of tokens whose importance weight was capped",
    "correction/weight": "mean importance weight",
    "credit/mean_advantage": "mean advantage of sampled tokens, weighted as in the loss, in units of their root mean square",
    "credit/without_baseline": "episodes left out of the update because there is no other episode to compare them with",
    "credit/zero_groups": "share of groups in which all episodes have equal returns, so that they give no signal; groups of one do not count with a group baseline",
    "critic/clipped": "share of values outside of the clip of the value loss",
    "critic/skipped": "critic updates skipped because of a gradient that is not finite",
    "entropy/coefficient": "coefficient of the entropy bonus",
    "generate/answers": "answers written",
    "generate/cut_off": "answers truncated at the token limit",
    "generate/cut_off_high": "upper end of the 95% interval of `generate/cut_off_share`",
    "generate/cut_off_low": "lower end of this interval",
    "generate/cut_off_share": "share of truncated answers, a mean over rows",
    "generate/missing": "rows without an answer",
    "generate/rows": "rows answered",
    "generate/thinking": "answers with a thinking block",
    "generate/thinking_only": "answers truncated inside their thinking block",
    "generate/thinking_tokens": "tokens of thinking blocks",
    "generate/tokens": "tokens sampled",
    "loss/dft": "loss of dynamic fine-tuning, per token",
    "loss/distillation": "distillation loss per token; for `reverse_kl` a surrogate whose value has no meaning",
    "loss/kl_cov": "covariance penalty",
    "loss/nll": "negative log-likelihood, nats per token",
    "loss/preference": "preference loss, per row",
    "loss/unevenness": "regularizer of unit rewards",
    "optimizer/no_signal": "1 if an update had no gradient because no episode had credit",
    "optimizer/skipped": "1 if an update was skipped because its gradient was not finite",
    "policy/bonus_entropy": "entropy at the tokens of the entropy bonus, nats",
    "policy/clip_cov_masked": "share of tokens without a gradient because of `clip_cov`",
    "policy/clip_dual": "share of tokens at the dual clip",
    "policy/clip_high": "share of tokens clipped above",
    "policy/clip_low": "share of tokens clipped below",
    "policy/clipped_before_update": "share of tokens that lose their gradient to the clip before any weight has changed",
    "policy/covariance": "mean product of centered log-probability and centered advantage",
    "policy/divergence": "divergence from the policy that sampled (`dppo`)",
    "policy/gate": "mean gate of `sapo`",
    "policy/kl_clamped": "share of tokens whose k3 estimate reached its limit of 10",
    "policy/kl_cov_held": "share of tokens with the penalty of `kl_cov`",
    "policy/kl_rollout_k1": "KL divergence of learner and engine, estimator k1, nats per token",
    "policy/kl_rollout_k3": "the same with estimator k3",
    "policy/low_entropy_masked": "share of tokens without a gradient because of `entropy.top_share`",
    "policy/off_policy_masked": "share of tokens masked by `loss.off_policy_mask`",
    "policy/ratio": "mean probability ratio",
    "policy/staleness_max": "largest number of optimizer updates between sampling a token and training on it",
    "policy/staleness_mean": "mean number of these updates",
    "policy/truncated_masked": "share of episodes masked by `loss.mask_truncated`",
    "preference/mismatched": "mismatched pairs behind KTO's KL estimate",
    "preference/shift": "shift of BCO",
    "reference/updates": "updates of a reference model that follows the policy",
    "rollout/episodes": "episodes of the step",
    "rollout/failed": "episodes that failed",
    "rollout/kept": "episodes of the step after `rollout.filter`",
    "rollout/restarted": "episodes restarted on new weights",
    "rollout/stale": "episodes dropped as stale",
    "rollout/unscored": "episodes to which no reward applies",
    "rollout/success": "success of the training episodes",
    "speed/tokens_per_second": "tokens sampled per second",
    "teacher/agreement": "share of sampled tokens that the teacher ranks first",
    "teacher/failed": "episodes without scores of the teacher",
    "teacher/logprob": "mean log-probability of sampled tokens under the teacher",
    "teacher/off_policy": "1 on steps that train on fixed rows",
    "teacher/reverse_kl": "mean of log policy - log teacher at sampled tokens, nats",
    "teacher/without_context": "episodes without a field that `teacher.context` needs",
    "test/accuracy": "share of test pairs ranked correctly",
    "test/loss": "loss of the test rows",
    "test/margin": "mean margin of the test pairs",
    "memory/gpu": "largest memory that torch allocated on the GPU so far, in bytes",
    "memory/process": "largest resident memory of the process so far, in bytes",
    "memory/key_value_cache": "largest size of the local engine's key/value cache so far, in bytes",
    "test/rows": "number of test rows",
    "time/decoding": "seconds of the local engine's passes on sampled tokens, summed over processes",
    "time/generate": "seconds of generation",
    "time/overlap_share": "share of the sampling time during which the learner did not wait",
    "time/prompts": "seconds of the local engine's passes on prompt tokens, summed over processes; the rest of the rollout is rendering, environments and scheduling",
    "time/run": "seconds since the run started",
    "time/sampling": "seconds of sampling the batch",
    "time/step": "seconds of the step",
    "time/units": "seconds of unit credit, part of `time/credit`",
    "time/waited_for_learner": "seconds that sampling waited for weights",
    "time/weights": "seconds of sending weights to the engine, part of `time/rollout`",
    "tokens/discarded": "tokens of restarted episodes",
    "tokens/prefilled": "prompt tokens computed",
    "tokens/reused": "prompt tokens taken from the cache",
    "tokens/sampled": "tokens sampled",
    "tokens/trained": "tokens in the loss",
    "tools/calls": "well-formed tool calls per episode",
    "tools/failed_share": "share of the well-formed calls of unknown tools, with wrong arguments, or that raised an error",
    "tools/malformed_share": "share of all calls that could not be parsed",
    "units/clipped": "reward-model values at the limit of `reward.clip`",
    "units/credit": "mean credit of a unit",
    "units/forwards": "texts that the reward model read to compute the credit",
    "units/tokens": "tokens of these texts",
    "units/tokens_per_unit": "mean tokens of a unit",
    "units/without": "share of scored episodes without units",
    "validation/loss": "loss of the validation rows",
    "validation/perplexity": "perplexity of the validation rows",
    "validation/rows": "number of validation rows",
}
"""Meaning of each metric that no panel of a report describes."""


def metrics_of_the_source() -> set[str]:
    """Every metric that a string of the source names in full."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.fullmatch(node.value):
                found.add(node.value)
    return found - NOT_METRICS


def meanings_of_panels() -> dict[str, str]:
    """Metric -> what the figures of a report say about it."""
    from posttrain.runs.panels import PANELS

    return {
        curve.key: f"{panel.title}: {curve.label}, {panel.unit}"
        for panels in PANELS.values()
        for panel in panels
        for curve in panel.curves
    }


def markdown_of_metrics() -> str:
    """The page of all metrics."""
    meanings = {**meanings_of_panels(), **MEANINGS}
    lines = [
        "# Metrics",
        "",
        "Every line of `metrics.jsonl` has `kind` (`train`, `evaluation`, `final`, `warning`), `step`, and the metrics below.",
        "Held-out episodes have `success`, `return`, `tokens_per_answer`, `turns`, `rejected_share` and `score/NAME` without a",
        "prefix, with `_low` and `_high` for the ends of 95% intervals. `rollout/` is the same for training episodes.",
        "This page is generated from the source.",
        "",
        "| metric | meaning |",
        "|---|---|",
    ]
    lines += [
        f"| `{name}` | {meanings[name].replace('|', chr(92) + '|')} |"
        for name in sorted(metrics_of_the_source() | set(meanings_of_panels()))
    ]
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


def _commands(command: Any, name: str) -> list[str]:
    """Markdown of a command, then of its subcommands."""
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

        context = Context(command)
        for each in command.list_commands(context):
            parts += _commands(command.get_command(context, each), f"{name} {each}")
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


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put generated tables where a page asks for them."""
    while (found := IMPORT.search(markdown)) is not None:
        before = markdown[: found.start()]
        markdown = before + markdown_of_import(before, found["recipe"], found["rows"]) + markdown[found.end() :]
    return re.sub(r"^<!-- audit: (\w+) -->$", lambda match: markdown_of_audit(match[1]), markdown, flags=re.M)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    for path, text in (
        ("reference/command_line.md", markdown_of_commands()),
        ("reference/metrics.md", markdown_of_metrics()),
    ):
        files.append(File.generated(config, path, content=text))
    return files
