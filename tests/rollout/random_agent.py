"""An agent of tests on the published clients: it continues, forks, edits and forgets conversations at random.

Its argument is the number of calls. Conversations have tools, stop strings, streaming and calls at the same time.
"""

import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

draw = random.Random(int(os.environ["POSTTRAIN_SEED"]))
client = openai.OpenAI()
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def ask(messages, tools, streamed):
    """The conversation with the answer of the model."""
    settings = {"tools": TOOLS} if tools else {}
    if not streamed:
        answer = client.chat.completions.create(model="policy", messages=messages, **settings).choices[0].message
        return [*messages, answer.model_dump(exclude_none=True)]
    events = client.chat.completions.create(model="policy", messages=messages, stream=True, stop=["arm"])
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    return [*messages, {"role": "assistant", "content": text}]


def next_call(number):
    messages = list(draw.choice(conversations[-6:]))
    if draw.random() < 0.2:
        messages = messages[: draw.randrange(len(messages)) + 1]
    if len(messages) > 8:
        messages = [{"role": "user", "content": f"compacted {number}"}]
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": f"message {number}"})
    tools = draw.random() < 0.2
    return messages, tools, not tools and draw.random() < 0.3


conversations = [[{"role": "user", "content": os.environ["POSTTRAIN_TASK"]}]]
calls, number = int(sys.argv[1]), 0
if draw.random() < 0.25:
    for number in range(1, 9):
        client.chat.completions.create(
            model="policy", max_tokens=5, messages=[{"role": "user", "content": f"question {number}"}]
        )
with ThreadPoolExecutor(2) as threads:
    while number < calls:
        asked = [next_call(number + i) for i in range(min(2, calls - number))]
        number += len(asked)
        conversations += threads.map(lambda call: ask(*call), asked)
print(json.dumps({"reward": sum("e" in talk[-1].get("content", "") for talk in conversations) / len(conversations)}))
