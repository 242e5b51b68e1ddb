"""Methods compared fairly: same data, clients, networks and participants per seed; several seeds; statistics.

Nothing is imported here: workers, which need no statistics, start faster.
"""
