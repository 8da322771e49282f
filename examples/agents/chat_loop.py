"""An agent: a loop over the `openai` client. It asks until an answer has the form `<answer>...</answer>`, three times at most."""

import os
import re

from openai import OpenAI

client = OpenAI()
messages = [
    {"role": "system", "content": "Answer with one of the names, as <answer>name</answer>."},
    {"role": "user", "content": os.environ["POSTTRAIN_TASK"]},
]
answer = ""
for _ in range(3):
    completion = client.chat.completions.create(model="policy", messages=messages)
    answer = completion.choices[0].message.content or ""
    if re.fullmatch(r"\s*<answer>[^<]*</answer>\s*", answer):
        break
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Write only <answer>name</answer>."},
    ]
print(answer)
