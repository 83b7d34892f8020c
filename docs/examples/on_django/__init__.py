"""Django application whose actors use the middleware of housekeeping."""
