"""What users write: apps, tasks, flows."""
