"""What has been learned: features once, then figures with and without labels. Never touches the model."""
