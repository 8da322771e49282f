"""Commands of other frameworks as recipes: `posttrain import`."""

__version__ = "0.2.0"
