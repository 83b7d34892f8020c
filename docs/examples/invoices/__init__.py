"""An application with a Dramatiq broker and middleware of its own, on which housekeeping was installed."""
