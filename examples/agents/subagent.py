"""An agent that starts a second one, using the standard library only.

The subagent proposes a name in a conversation of its own. The agent sees the proposal and answers.
"""

import json
import os
import subprocess
import sys
import urllib.request


def chat(messages):
    """The text of the model's answer to `messages`."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


if sys.argv[1:] == ["--propose"]:
    print(chat([{"role": "user", "content": sys.stdin.read()}]))
else:
    task = json.loads(os.environ["POSTTRAIN_MESSAGES"])
    question = task[-1]["content"]
    run = subprocess.run(
        [sys.executable, "-I", __file__, "--propose"], input=question, capture_output=True, text=True, check=True
    )
    task[-1]["content"] = f"{question}\nA colleague says: {run.stdout.strip()}"
    print(chat(task))
