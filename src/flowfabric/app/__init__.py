"""Apps, tasks and flows, as users declare them."""
