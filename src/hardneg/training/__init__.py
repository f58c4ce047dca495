"""Training: recipes, optimisers, batches and runs."""
