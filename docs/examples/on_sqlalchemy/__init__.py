"""An application on SQLAlchemy whose actors stand on housekeeping's middleware."""
