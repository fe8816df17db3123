"""Data: readers and generators. Nothing here knows a model."""
