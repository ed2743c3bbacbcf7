"""Where functions run that would block the event loop: threads and processes."""
