"""The memory agent: a model that keeps Markdown notes by writing Python. A plug-in of posttrain, see docs/how-to/memory_agent.md."""

__version__ = "0.2.0"
