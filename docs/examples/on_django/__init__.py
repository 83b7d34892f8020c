"""A Django application whose actors stand on housekeeping's middleware."""
