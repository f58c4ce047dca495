"""Methods: how encoders, views, memory and an objective are wired together, as LightningModules."""
