"""Nyström attention with an exact near field."""
