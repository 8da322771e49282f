"""An agent on smolagents: its `ToolCallingAgent` with one tool. Needs `pip install 'smolagents[openai]'`."""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def last_letter(word: str) -> str:
    """The last letter of a word.

    Args:
        word: the word.
    """
    return word[-1:]


model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[last_letter], model=model, max_steps=2, verbosity_level=0)
print(agent.run(os.environ["POSTTRAIN_TASK"]))
