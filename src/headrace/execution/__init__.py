"""A model at work: loading, memory, the step, the worker that the scheduler talks to."""
