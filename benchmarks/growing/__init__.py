"""Costs measured against one size at a time: of the engine, of the learner, and of the memory of a long run."""
