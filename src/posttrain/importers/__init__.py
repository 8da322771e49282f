"""Commands of other frameworks as recipes: `posttrain import`."""
