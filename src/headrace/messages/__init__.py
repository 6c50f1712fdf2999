"""All structs that cross a process or thread boundary: typed, frozen, without behaviour. Imports nothing above it."""
