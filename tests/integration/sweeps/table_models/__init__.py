"""Sweeps on tables that Django or SQLAlchemy has declared."""
