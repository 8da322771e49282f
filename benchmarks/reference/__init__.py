"""Formulas of the papers in plain PyTorch and float64, for `crosscheck.py`. Nothing here imports posttrain."""
