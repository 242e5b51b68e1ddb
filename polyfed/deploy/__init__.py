"""Real federations: what server and sites are told, and the keys by which they know each other."""
