"""Environments for posttrain: adapters to other packages, small text tasks, and the rationales data set."""

__version__ = "0.2.0"
