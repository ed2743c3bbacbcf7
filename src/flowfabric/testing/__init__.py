"""For tests of your own tasks."""
