"""Graphs: data, views, encoders."""
