"""Tables and pictures from runs, and the display of a run's progress."""
