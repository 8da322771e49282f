"""Generated worlds as Markdown vaults, with tasks whose correct result is known."""
