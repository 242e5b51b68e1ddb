"""Methods compared fairly: same data, clients, networks and participants per seed; several seeds; statistics."""
