"""Views: random transformations of a batch that keep what it shows."""
