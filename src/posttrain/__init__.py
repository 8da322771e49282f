"""posttrain: post-training of language models and language-model agents.

Importing the package is light: torch, transformers and every optional sink load only where they are used.
"""

__version__ = "0.1.0"
