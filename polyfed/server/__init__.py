"""The server's side of a run: it sees messages and profiles, never data or a private model."""
