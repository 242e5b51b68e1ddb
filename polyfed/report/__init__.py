"""Tables and pictures from runs, and how a run shows itself while it goes on."""
