"""The learners that are compared: each run is a separate process that trains by the public path of its system.

`python -m learners.posttrain_side JOB RESULT` and `python -m learners.trl_side JOB RESULT` read the same job (see
`job.py`) and write what `recording.Recorder` measured.
"""
