"""What the benchmarks share: models, rows, timing of sides in turn, and the one table each prints."""
