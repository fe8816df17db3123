"""What all trainings share: recipes, arguments, callbacks, packed batches, and what ends a run early."""
