"""``python -m housekeeping`` is the command line."""

from housekeeping.cli import main

if __name__ == "__main__":
    main()
