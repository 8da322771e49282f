"""An agent of tests that uses the standard library only. Its first argument says what it does."""

import json
import os
import subprocess
import sys
import time
import urllib.request


def chat(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def ask(words="hello"):
    return chat([{"role": "user", "content": words}])


kind = sys.argv[1]
if kind == "late":
    # A grandchild that outlives the agent's own process and has a process group of its own.
    ask()
    subprocess.Popen([sys.executable, "-I", "-S", __file__, "later"], start_new_session=True)
elif kind == "later":
    time.sleep(0.5)
    ask()
elif kind == "crash":
    ask()
    raise ValueError("the agent lost its way")
elif kind == "hang":
    ask()
    time.sleep(600)
elif kind == "silent":
    print("no call")
elif kind == "task":
    ask()
    given = os.environ["POSTTRAIN_TASK"], sys.stdin.read(), sys.argv[2]
    print(json.dumps({"reward": float(len(set(given)) == 1 and f"Task {os.environ['POSTTRAIN_SEED']}" in given[0])}))
elif kind == "report":
    print(ask())
    print(json.dumps({"reward": 0.25, "scores": {"speed": 2}, "answer": "x"}))
elif kind == "bad_report":
    ask()
    print(json.dumps({"reward": "much"}))
elif kind == "file":
    ask()
    with open(os.environ["POSTTRAIN_REPORT"], "w") as file:
        file.write(json.dumps({"reward": 2, "success": False}))
elif kind == "answer":
    print(ask(os.environ["POSTTRAIN_TASK"]))
elif kind == "conversation":
    # Two turns and another conversation in between.
    first = [{"role": "user", "content": sys.stdin.read()}]
    answer = chat(first)
    ask("a subagent")
    print(chat([*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "again"}]))
