"""The memory agent's journey: docs/migrating/memory_gspo.md, "Your own records", on records in the format of the published run.

The judge is a local server that refuses what o3 refuses. The model is tiny and knows four messages, one token each, of which
it samples one at every turn. So each kind of task is solved sometimes, and the rewards of all episodes are known.
"""

import json
import re

import pytest
import yaml

from posttrain.recipe.compose import load_recipe
from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.runs.metrics import read_metrics
from posttrain.runs.tables import read_run_results
from tests.conftest import make_tokenizer, tiny_config
from tests.evaluation.judge_server import serving
from tests.journeys import ROOT, commands, dry, place_recipes, run, with_values

PAGE, SECTION = "docs/migrating/memory_gspo.md", "The records"
MODEL = "Qwen/Qwen3-4B-Thinking-2507"
LINE = "\n\n~/~/~/~/~/~/~/~/~/~/~/~\n\n"
FIRST = ("Ada", "Bruno", "Carla", "Daniel", "Elif", "Farid", "Greta", "Hana", "Ivo", "Jonna", "Kofi", "Lena")
CITIES = ("Bern", "Oslo", "Bern", "Turin")
STEPS, GROUPS = 3, 8
"""The settings that the page recommends for a first run."""
PAID = (0.0, 0.05, 0.0875, 0.1125, 0.125)
"""The sum of the rewards of code after so many messages with code."""
MESSAGES = (
    't</think><python>\ntext = read_file("user.md")\n</python>',
    "t</think><reply>Bern.</reply>",
    "t</think><reply>I do not know which colleague you mean. Who is it?</reply>",
    't</think><python>\ndone = append_file("user.md", "- **locker**: 77\\n")\n</python>',
)
"""What the model may say: look, the answer of half of the retrieval tasks, a question back, the change of every update."""


def write_records(folder):
    """24 memories with four tasks each, of which the last 8 are the validation file: the author's files and columns."""
    rows = []
    for number in range(24):
        name, friend = FIRST[number % 12], FIRST[(number + 5) % 12]
        memory = f"{name.lower()}_{number}"
        path = f"memory/{memory}/entities/{friend.lower()}.md"
        city = CITIES[number % 4]
        entity = {"entity_name": friend, "entity_file_path": path}
        entity["entity_file_content"] = f"# {friend}\n- **city**: {city}\n"
        user = f"# {name}\n- **age**: {30 + number}\n\n"
        user += f"## Relationships\n- **friend**: [[entities/{friend.lower()}.md]]\n"
        place = folder / "data" / "instances" / memory / "base_memory.json"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps({"mem_id": memory, "user_md": user, "entities": [entity]}))
        update = f"Please note that my locker is number 77 now, since week {number}."
        rows += [
            ("retrieval", memory, f"In which city does my friend {friend} live?", city),
            ("retrieval", memory, f"How old am I this year, {name}?", str(30 + number)),
            ("update", memory, update, update),
            ("clarification", memory, f"When does my colleague {number} retire?", CLARIFICATIONS[number % 4]),
        ]
    mixed = folder / "data" / "openrlhf" / "mixed"
    mixed.mkdir(parents=True)
    for file, part in (("train", rows[:-8]), ("valid", rows[-8:])):
        (mixed / f"{file}.jsonl").write_text("".join(json.dumps(record(*row)) + "\n" for row in part))
    settings = "INIT_KL_COEF=0.1 KL_TARGET=0.02 KL_HORIZON=256 ADVANTAGE_ESTIMATOR=group_norm MAX_EPOCHS=10"
    settings += f" ACTOR_LR=1e-6 CRITIC_LR=2e-5 NUM_EPISODES=8 SAVE_PATH=saved CKPT_PATH=kept MODEL_NAME={MODEL}"
    command = (ROOT / "plugins" / "imports" / "tests" / "commands" / "memory.sh").read_text()
    (folder / "train_agent.sh").write_text("\n".join([*settings.split(), command]))
    items = {
        "retrieval": {"question": "Where do I live?", "answer": "Bern", "judge": "The reply says Bern."},
        "update": {"update": "My locker is 77.", "question": "Which locker is mine?", "answer": "77", "diff": []},
        "clarification": {"question": "When does my colleague Ida retire?", "answer": "", "judge": "It asks."},
    }
    for kind, item in items.items():
        notes = folder / "data" / "eval" / kind / "1" / "user.md"
        notes.parent.mkdir(parents=True)
        notes.write_text("# Me\n- **city**: Bern\n")
        (notes.parents[1] / "1_qa.jsonl").write_text(json.dumps(item) + "\n")


CLARIFICATIONS = (
    "Your notes do not have this colleague. Which one do you mean?",
    "There is no such person in the notes, so please tell me who it is.",
    "The notes name no date. Say more about it.",
    "I cannot find it.",
)
"""Recorded replies: with a question, with a request, and two that a program would not take for a question."""


def record(kind, memory, question, answer):
    system = {"role": "system", "content": "Keep a memory."}
    messages = [system, {"role": "user", "content": question}]
    return {"context_messages": messages, "label": LINE.join((kind, memory, answer))}


def write_model(folder):
    """A Qwen3 that samples one of `MESSAGES` uniformly and ends. Its layers add nothing to the embeddings."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    tokenizer.add_tokens(list(MESSAGES))
    config = tiny_config("qwen3", len(tokenizer))
    config.tie_word_embeddings, config.max_position_embeddings = False, 8192
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    said, end = [tokenizer.convert_tokens_to_ids(text) for text in MESSAGES], tokenizer.eos_token_id
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embeddings.zero_()[:, 0] = 1.0
        embeddings[said] = 0.0
        embeddings[said, 1] = 1.0
        head.zero_()[:, :2] = -4.0
        head[said, 0], head[end, 1] = 4.0, 4.0
    model.save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)


def says_done(frames, number):
    """The judge: full points for the answer, for a question back, or where the notes gained the new locker and lost nothing."""
    lines = frames["changes"].split("\n")
    if "locker" in frames["user"]:
        right = "+- **locker**: 77" in lines and not any(re.match(r"-(?!--)", line) for line in lines)
    elif "colleague" in frames["user"]:
        right = "?" in frames["reply"]
    else:
        right = frames["reference"] in frames["reply"]
    return {"reason": "compared", "score": 10 if right else 0}


def own_recipe(url):
    """The page's own.yaml with the address of the local judge and smaller numbers."""
    section = (ROOT / PAGE).read_text().split(f"## {SECTION}\n")[1].split("\n## ")[0]
    values = yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.S)[1])
    assert values["environment"]["judge"]["url"]
    assert set(values) == {"environment", "steps", "rollout"}
    assert set(values["rollout"]) == {"groups_per_step"}
    values["environment"]["judge"]["url"] = url
    return values | {"steps": STEPS, "rollout": {"groups_per_step": GROUPS}}


def page_commands():
    """The page's commands for the steps of a small run: 1 for 13 and 21, 3 for 38."""
    found = [with_values(command, {"--until": 1, "--step": 1}) for command in commands(PAGE, SECTION)]
    return [command.replace("step_000021", "step_000001").replace("step_000038", "step_000003") for command in found]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the author's files, the recipes, and the model under its name."""
    write_records(tmp_path)
    write_model(tmp_path)
    place_recipes(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-author")
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_the_records_are_valid_and_the_training_commands_have_plans(folder):
    with serving(says_done, reasoning=True) as server:
        (folder / "own.yaml").write_text(yaml.safe_dump(own_recipe(server.url)))
        validate, *rest = page_commands()
        shown = run(validate)
        assert "memory: valid on 66 of 66 tasks" in shown
        assert "22 rows dropped" in shown
        planned = [command for command in rest if command.startswith("posttrain rl")]
        assert len(planned) == 3
        shown = run(f"{dry(planned[0])} --full")
        assert "88" in shown
        run(dry(planned[2]))


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.timeout(3600)
def test_the_commands_produce_the_results_of_the_author(folder):
    with serving(says_done, reasoning=True) as server:
        (folder / "own.yaml").write_text(yaml.safe_dump(own_recipe(server.url)))
        for command in page_commands():
            run(command)
        asked = list(server.requests)
    assert asked
    for request in asked:
        assert request["model"] == "o3"
        assert request["reasoning_effort"] == "medium"
        assert not {"temperature", "max_tokens"} & set(request)
        assert request["key"] == "Bearer key-of-the-author"
    trained = folder / "runs" / "memory-gspo-published"
    check_checkpoints(trained)
    check_rewards(trained)
    check_schedule(trained)
    check_scores(folder, trained)
    for name in ("reward", "learning_curve", "kl", "lengths"):
        assert is_picture(trained / "plots" / "until_step_1" / f"{name}.png")
    table = re.search(r"## Scores by checkpoint\n\n(.*?)\n\n", (trained / "report.md").read_text(), re.S)[1]
    assert len(table.splitlines()) == 2 + STEPS + 1


def check_checkpoints(trained):
    """Every step is kept as a model that transformers load, without training state, as the run has ended."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kept = sorted((trained / "checkpoints").iterdir())
    assert [path.name for path in kept] == [f"step_{step:06d}" for step in range(STEPS + 1)]
    assert not any((path / "tensors").exists() for path in kept)
    for path in (kept[1] / "policy", trained / "model"):
        assert AutoModelForCausalLM.from_pretrained(path).config.model_type == "qwen3"
        assert "<think>" in AutoTokenizer.from_pretrained(path).chat_template


def check_rewards(trained):
    """Each training episode has the published rewards only: success, reading user.md first, decreasing rewards of code."""
    returns = []
    for stored in stored_steps(trained / "episodes"):
        if stored.split != "train":
            continue
        episodes = read_episodes(stored.path).episodes
        assert len(episodes) == 4 * GROUPS
        for episode in episodes:
            code = sum("<python>" in turn.answer for turn in episode.turns)
            looked = "read_file" in episode.turns[0].answer
            replied = "<reply>" in episode.turns[-1].answer
            expected = episode.success + 0.1 * looked + PAID[min(code, 4)] - 0.1 * (not replied)
            assert episode.total_reward == pytest.approx(expected)
            returns.append(episode.total_reward)
    assert len(returns) == 4 * GROUPS * STEPS
    assert len(set(returns)) > 3


def check_schedule(trained):
    """40 updates a step, in the warm-up of OpenRLHF's schedule."""
    recipe = load_recipe(["memory/gspo_published"], [], "rl")
    lines = [line for line in read_metrics(trained / "metrics.jsonl") if line["kind"] == "train"]
    for line in lines:
        done = 40 * line["step"] / recipe.optimizer.warmup_updates
        assert line["optimizer/learning_rate"] == pytest.approx(1e-6 * done, rel=0.05)


def check_scores(folder, trained):
    """The published table: each score is the mean over the tasks of its kind, and the training return that of the run."""
    title = "## Scores by checkpoint: memory-gspo-published"
    text = (folder / "runs" / "scores" / "report.md").read_text().split(f"{title}\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    headings, _, *rows = rows
    assert headings[:4] == ["step", "retrieval", "update", "clarification"]
    assert headings[-2:] == ["overall success", "training return"]
    assert [row[0] for row in rows] == [str(step) for step in range(STEPS + 1)]
    lines = [line for line in read_metrics(trained / "metrics.jsonl") if line["kind"] == "train"]
    returns = {line["step"]: line["rollout/return"] for line in lines}
    overall = []
    for step, row in enumerate(rows):
        one = folder / "runs" / "scores" / f"step_{step:06d}"
        (stored,) = stored_steps(one / "episodes")
        episodes = read_episodes(stored.path).episodes
        for kind, cell in zip(headings[1:4], row[1:4], strict=True):
            of_kind = [episode.success for episode in episodes if episode.turns[-1].info["kind"] == kind]
            assert cell.startswith(f"{sum(of_kind) / len(of_kind):.3f} [")
        overall.append(sum(episode.success for episode in episodes) / len(episodes))
        assert row[-2].startswith(f"{overall[-1]:.3f} [")
        assert row[-1] == (f"{returns[step]:.3f}" if step else "–")
        (policies, *_) = read_run_results(one).tables
        assert {"random policy", MODEL} & {line[0] for line in policies.rows} or policies.rows
    assert max(overall) > 0
    separate = (folder / "figures" / "results.md").read_text().split(title)[1]
    assert re.findall(r"^\| (\d+) \|", separate, re.M) == ["1", "3"]
    for name in ("metrics_vs_overall", "metrics_vs_step", "metrics_vs_training"):
        for place in (folder / "runs" / "scores" / "plots", folder / "figures", trained / "plots"):
            assert is_picture(place / f"{name}.png")


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
