"""Serving: an engine that answers many requests at once, and the HTTP server and terminal in front of it."""
