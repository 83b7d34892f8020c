"""Process that sends messages like an application. It reads one message per line and writes one answer per line."""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    """Send each message from stdin: ``{"actor", "args", "kwargs", "options"}``."""
    actors = importlib.import_module(sys.argv[1]).actors
    for line in sys.stdin:
        wish = json.loads(line)
        try:
            message = actors[wish["actor"]].send_with_options(
                args=tuple(wish.get("args", ())), kwargs=wish.get("kwargs", {}), **wish.get("options", {})
            )
            answer = {"id": message.message_id, "duplicate_of": message.options.get("duplicate_of")}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
