"""The parts of `gpu.py`: what is measured on one GPU, with torch, transformers and numpy alone."""
