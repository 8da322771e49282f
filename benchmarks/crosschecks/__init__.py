"""The package's side of `crosscheck.py`: random episodes, and the loss and gradient that the package computes for them."""
