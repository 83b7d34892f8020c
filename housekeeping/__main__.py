"""``python -m housekeeping`` is the command line."""

from housekeeping.cli.main import main

if __name__ == "__main__":
    main()
