"""What the cost model predicts: beside recorded speeds, for clusters, and for placements that others have published."""
