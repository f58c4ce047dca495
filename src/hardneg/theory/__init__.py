"""Numerical checks of published statements about contrastive learning."""
