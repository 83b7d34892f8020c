"""Floor 4: the dashboard, rendered by the server, with nothing loaded from elsewhere."""
