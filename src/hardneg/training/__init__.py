"""Training: recipes, optimizers, batches and runs."""
