"""The command line from its first moment."""

from polyfed.early import stopping_at_once


def main() -> None:
    """Run `polyfed`."""
    with stopping_at_once():
        from polyfed.cli import main as run

    run()


if __name__ == "__main__":
    main()
