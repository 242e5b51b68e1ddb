"""`python -m polyfed` is `polyfed`."""

from polyfed.cli import main

main()
