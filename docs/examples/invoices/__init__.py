"""Application with its own Dramatiq broker and middleware, plus the middleware of housekeeping."""
