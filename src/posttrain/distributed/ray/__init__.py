"""Runs on a Ray cluster: placement of workers, restart of workers that die, and detection of hangs.

Modules import ray inside functions, so that importing them does not require ray.
"""
