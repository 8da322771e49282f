"""The engines that are compared, each in a separate process that answers jobs over a pipe.

A worker reads one JSON object a line, the fields of `workload.Job`, and writes one a line: `seconds` (wall-clock, the
whole job), `tokens` (sampled tokens that were requested), `first` (median seconds until a request is answered, which
in jobs of one token a request is the time to the first token) and what else the engine counts. Before the first job it
writes one object, `{"version": ...}`.
"""
