"""SQLAlchemy application whose actors use the middleware of housekeeping."""
