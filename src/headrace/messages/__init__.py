"""Every struct that crosses a process or a thread: typed, frozen, without behaviour. Imports nothing above it."""
