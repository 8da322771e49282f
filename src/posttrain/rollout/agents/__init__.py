"""Episodes played by agents: programs that call the policy through a chat endpoint of the run.

`worker` plays an episode: it starts the agent (`process`), whose calls arrive over HTTP (`endpoint`) in one of two
formats (`formats`) and become tokens and streams (`session`).
"""
