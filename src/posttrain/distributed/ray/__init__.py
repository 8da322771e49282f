"""A run on a Ray cluster: who runs where, workers that are replaced when they die, and hangs that are named.

Modules import ray inside functions; `plan` and what it needs work without ray and without torch.
"""
