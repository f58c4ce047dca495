"""Diagnostics of embeddings and losses as functions of tensors; `hardneg.insight` exports them."""
