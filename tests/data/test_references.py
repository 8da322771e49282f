"""The reference answer of a row in every format."""

import pytest

from posttrain.data.convert import reference_answer
from posttrain.data.examples import prompt
from posttrain.data.messages import PromptExample
from posttrain.recipe.data import ColumnsRecipe

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("row", "reference", "columns"),
    [
        ({"prompt": "2 + 2?", "completion": "4"}, "4", {}),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, "4", {}),
        ({"prompt": "2 + 2?", "label": 4}, "4", {}),
        ({"prompt": "2 + 2?", "completion": "", "label": "4"}, "4", {}),
        ({"messages": [QUESTION, ANSWER]}, "4", {}),
        ({"messages": [QUESTION, {"role": "assistant", "content": "5"}, QUESTION, ANSWER]}, "4", {}),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "4", {}),
        ({"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER]}, "4", {}),
        ({"prompt": "2 + 2?", "messages": [QUESTION, ANSWER]}, None, {}),
        ({"prompt": "2 + 2?", "label": True}, None, {}),
        ({"prompt": "2 + 2?"}, None, {}),
        ({"prompt": "2 + 2?", "completion": [{"role": 3}]}, None, {}),
        ({"question": "2 + 2?", "gold": "4", "completion": "5"}, "4", {"prompt": "question", "completion": "gold"}),
    ],
)
def test_the_reference_of_each_form(row, reference, columns):
    columns = ColumnsRecipe(**columns)
    read = prompt(row, "rows.jsonl row 1", columns)
    assert isinstance(read, PromptExample)
    assert reference_answer(read, columns) == reference
