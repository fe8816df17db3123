"""Distillation: the run, its model and trainer, and how closely a student follows its teacher."""
