"""The command line from its first moment."""

from polyfed.early import importing


def main() -> None:
    """Run `polyfed`."""
    with importing():
        from polyfed.cli import main as run

    run()


if __name__ == "__main__":
    main()
