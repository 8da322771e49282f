"""Episodes played by agents: programs (`worker`) that call the policy over HTTP (`endpoint`, `session`)."""
