"""Objectives: what a batch of embeddings is asked to become."""
