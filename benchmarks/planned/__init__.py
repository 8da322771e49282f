"""Predictions of the cost model: for recorded speeds, for clusters, and for published placements."""
