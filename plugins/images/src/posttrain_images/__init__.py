"""Models that read images: messages, tokens, exact forward passes."""

__version__ = "0.2.0"
