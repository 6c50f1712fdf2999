"""Model architectures: one file per family, a registry, and the fallback through transformers."""
