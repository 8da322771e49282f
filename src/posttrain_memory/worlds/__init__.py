"""Made-up worlds as markdown vaults, with tasks whose truth a program knows."""
