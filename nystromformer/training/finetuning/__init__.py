"""Fine-tuning: the sweep, its models, its data."""
