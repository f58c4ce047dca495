"""Loss functions of contrastive learning."""
