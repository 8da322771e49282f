"""The README, the tutorials and the site: what they show works, and what they generate is whole."""
