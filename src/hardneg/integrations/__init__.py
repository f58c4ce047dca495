"""Plug-ins for other training libraries: sentence-transformers and pytorch-metric-learning."""
