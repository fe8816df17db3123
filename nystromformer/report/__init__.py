"""Reports: tables from records, and from nothing else."""
